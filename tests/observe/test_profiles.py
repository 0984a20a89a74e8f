"""Saved profiles, as CPUs, GPUs and TPUs write them: the same table, and the rank that comes late."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jaxlib import _hlo

import jaxcoll as jc
from jaxcoll._watch.watch import read_folder

HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %all-reduce-start.1 = f32[1000]{0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
  ROOT %all-reduce-done.1 = f32[1000]{0} all-reduce-done(%all-reduce-start.1)
}
"""
STATS = ["hlo_module", "hlo_op", "run_id", "device_ordinal", "program_id", "hlo_proto"]
MS = 10**9  # picoseconds


def message(field, content):
    """Return a field of a protobuf message that is one itself, as bytes."""
    length, size = len(content), b""
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([field << 3 | 2]) + size + bytes([length]) + content


def stat(name, value):
    kind = "str_value" if isinstance(value, str) else "int64_value"
    value = f'"{value}"' if isinstance(value, str) else value
    return f"stats {{ metadata_id: {STATS.index(name) + 1} {kind}: {value} }}"


def event(metadata, start, duration, **stats):
    own = " ".join(stat(name, value) for name, value in stats.items())
    return f"events {{ metadata_id: {metadata} offset_ps: {start} duration_ps: {duration} {own} }}"


def line(name, events):
    return f'lines {{ name: "{name}" timestamp_ns: 0 {" ".join(events)} }}'


def plane(name, lines, *events):
    names = [f'event_metadata {{ key: {k} value {{ id: {k} name: "{event}" }} }}' for k, event in enumerate(events, 1)]  # fmt: skip
    stats = [f'stat_metadata {{ key: {k} value {{ id: {k} name: "{stat}" }} }}' for k, stat in enumerate(STATS, 1)]  # fmt: skip
    return f'planes {{ name: "{name}" {" ".join([*lines, *names, *stats])} }}'


def profile(platform, rank, late, *, with_programs=True, runs=12):
    """Runs of 20 ms, of which an all-reduce takes 3 ms, and longer where it waits for the other."""
    waits = 0 if late else 8 * MS
    starts = [20 * MS * k + (8 * MS if late else 0) for k in range(runs)]
    took = 3 * MS + waits
    if platform == "CPU":  # each event says its run
        named = {"hlo_module": "jit_step", "device_ordinal": 2048 * rank, "program_id": 7}
        events = [event(1, t, took, hlo_op="all-reduce-start.1", run_id=k, **named) for k, t in enumerate(starts)]  # fmt: skip
        text = plane("/host:CPU", [line("tf_XLAEigen", events)], "all-reduce-start.1")
    elif platform == "GPU":  # nothing says it
        named = {"hlo_module": "jit_step", "hlo_op": "all-reduce-start.1", "program_id": 7}
        events = [event(1, t, took, **named) for t in starts]
        text = plane("/device:GPU:0", [line("Stream #14(Kernel)", events)], "ncclDevKernel")
    else:  # the program around an instruction says it
        modules = [event(1, t, 12 * MS, run_id=k) for k, t in enumerate(starts)]
        events = [event(2, t + 1, took, program_id=7) for t in starts]
        lines = [line("XLA Modules", modules), line("XLA Ops", events)]
        text = plane("/device:TPU:0", lines, "jit_step(7)", "%all-reduce-start.1 = f32[1000] …")
    events = ProfileData.text_proto_to_serialized_xspace(text)
    if not with_programs:
        return events
    module = _hlo.hlo_module_from_text(HLO).as_serialized_hlo_module_proto()
    stats = message(5, message(6, message(1, module)))  # of the event's metadata
    metadata = message(4, b"\x08\x01" + message(2, stats))
    return events + message(1, message(2, b"/host:metadata") + metadata)


@pytest.mark.parametrize("platform", ["CPU", "GPU", "TPU"])
def test_profiles_of_two_hosts_name_the_one_that_comes_late(platform, tmp_path):
    for k, name in enumerate(["host-a", "host-b"]):
        folder = tmp_path / "plugins" / "profile" / f"2026_0{k}"
        folder.mkdir(parents=True)
        file = folder / f"{name}.xplane.pb"
        file.write_bytes(profile(platform, k, late=k == 1))
    programs = read_folder(tmp_path)
    (report,) = programs.reports
    assert (report.count, report.devices, report.wire_bytes) == (1, 2, 4000)
    ((last, _),) = report.measured.late
    assert (last.rank, last.share, last.seconds) == (1, 1.0, pytest.approx(8e-3))
    (times,) = report.measured.times
    assert times.transfer == pytest.approx(3e-3)
    assert times.waiting == pytest.approx((8e-3, 0))
    assert (times.algbw, times.busbw) == pytest.approx((4000 / 3e-3, 4000 / 3e-3))
    assert report.measured.step_seconds == pytest.approx(20e-3)
    assert report.measured.exposed_seconds == pytest.approx(7e-3)
    assert programs.late[0].startswith(
        "jit_step: rank 1 arrives late: last at all-reduce #0 in 100 %"
    )


def test_profiles_of_different_times_are_not_compared(tmp_path):
    for k in range(2):
        text = f'planes {{ name: "Task Environment" stats {{ metadata_id: 1 uint64_value: {k}000000000000 }} stat_metadata {{ key: 1 value {{ id: 1 name: "profile_start_time" }} }} }}'  # fmt: skip
        start = ProfileData.text_proto_to_serialized_xspace(text)
        (tmp_path / f"{k}.xplane.pb").write_bytes(profile("GPU", k, False, runs=12 + k) + start)
    (report,) = read_folder(tmp_path).reports
    assert report.measured is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello", "not a JAX profile"),
        (profile("CPU", 0, False, with_programs=False), "contain no communicating program"),
    ],
    ids=["text", "no programs"],
)
def test_what_cannot_be_read_is_said(content, words, tmp_path):
    (tmp_path / "a.xplane.pb").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_folder(tmp_path)


def test_programs_of_one_name_are_told_apart_by_their_numbers(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    total = jax.jit(lambda x: x.sum(0))
    xs = [jax.device_put(np.ones((n, 50), "f"), rows) for n in (8, 16)]
    jax.block_until_ready([total(x) for x in xs])
    with jax.profiler.trace(tmp_path):
        for _ in range(6):
            jax.block_until_ready([total(x) for x in xs])
    programs = [r for r in read_folder(tmp_path).reports if r.name == "jit__lambda"]
    assert len(programs) >= 2
    assert sum(r.measured is not None and r.measured.runs >= 5 for r in programs) == 2


class TestInPython:
    def test_one_step(self):
        @jc.data_parallel(donate_argnums=0)
        def step(w, x):
            return w - 0.1 * jc.grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)

        w = np.ones((16, 4), "f")
        report = jc.inspect(step, w, np.ones((32, 16), "f"), measure=4)
        assert (report.measured.ranks, report.measured.late) == ((0,), ())
        assert report.measured.runs >= 3
        (times,) = report.measured.times
        assert 0 < times.transfer < report.measured.step_seconds
        assert "measured in" in str(report)
        assert "transfer" in str(report)
        assert report.to_dict()["measured"]["runs"] == report.measured.runs
        assert report.requested is not None

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((jax.ShapeDtypeStruct((8,), "float32"),), "arrays as its arguments"),
            ((np.ones(8, "f"), "h100:8"), "without a topology"),
        ],
        ids=["shapes", "topology"],
    )
    def test_what_cannot_run_is_not_measured(self, arguments, words):
        x, *topology = arguments
        step = jax.jit(lambda x: x * 2)
        with pytest.raises(ValueError, match=words):
            jc.inspect(step, x, measure=3, topology=topology[0] if topology else None)
        for measure in (-1, 2.5):
            with pytest.raises(ValueError, match="at least 0"):
                jc.inspect(step, np.ones(8, "f"), measure=measure)
            with pytest.raises(ValueError, match="at least 0"), jc.inspecting(measure=measure):
                pass

    def test_a_block(self):
        mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
        rows = jax.NamedSharding(mesh, jax.P("data"))
        with jc.inspecting() as programs:
            jax.jit(lambda x: (x - 3).sum())(jax.device_put(np.ones((8, 7), "f"), rows))
            with pytest.raises(AssertionError, match="filled when its block ends"):
                jc.assert_collectives(programs, max_count=0)
        assert jc.assert_collectives(programs, max_count=1, kinds=["all-reduce"]) is programs
        with pytest.raises(AssertionError, match=r"jit__lambda exceeds .*\n.*max_count=0, found 1"):
            jc.assert_collectives(programs, max_count=0)
        assert "1 all-reduce" in str(programs)

    def test_a_block_that_raises_is_read_up_to_there(self):
        with pytest.raises(KeyError), jc.inspecting() as programs:  # noqa: PT012
            jax.jit(lambda x: x * 5)(np.ones(9, "f"))
            raise KeyError
        assert (programs.reports, programs.quiet > 0) == ((), True)

    def test_nothing_is_compiled_anew_nor_watched_after_the_block(self):
        with jc.inspecting() as programs:
            pass
        jax.jit(lambda x: x * 6)(np.ones(9, "f"))
        assert programs.quiet == 0
