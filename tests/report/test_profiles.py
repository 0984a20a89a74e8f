"""Saved profiles, in the form that TPUs, GPUs and CPUs write: the same table from each."""

import contextlib
import functools
import json
import os
import subprocess
import sys

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxlib import _hlo

import jaxcoll as jc
from jaxcoll._compat.running import read_fields
from jaxcoll._report.profile.profile import Compiled, read_profile
from jaxcoll._report.profile.watch import read_folder
from jaxcoll._report.programs import count_runs
from tests.report.xplanes import (
    MS,
    PLAIN,
    REDUCE,
    cpu,
    field,
    gpu,
    hlo,
    old_cpu,
    programs,
    steps,
    task,
    times_in,
    tpu,
)

approx = pytest.approx
PAIR = f"""  %all-reduce-start.1 = f32[1000]{{0}} all-reduce-start(%dot.1), {REDUCE}
  %all-reduce-done.1 = f32[1000]{{0}} all-reduce-done(%all-reduce-start.1)"""
LOOP = f"""
%body (t: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %t = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[1000] get-tuple-element(%t), index=1
  %fusion.8 = f32[1000] multiply(%y, %y)
  %all-reduce.7 = f32[1000] all-reduce(%fusion.8), {REDUCE}
  %fusion.9 = f32[1000] multiply(%all-reduce.7, %y)
  ROOT %tuple.1 = (s32[], f32[1000]) tuple(%next, %fusion.9)
}}

%condition (t: (s32[], f32[1000])) -> pred[] {{
  %t = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
"""
WHILE = """  %zero = s32[] constant(0)
  %state = (s32[], f32[1000]) tuple(%zero, %dot.1)
  %while.1 = (s32[], f32[1000]) while(%state), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}"""
LOOPED = hlo(WHILE, before=LOOP)
TURNS = [op for t in (0, 3, 6, 9) for op in [("fusion.8", t, t + 1), ("all-reduce.7", t + 1, t + 2)]]  # fmt: skip


def computation(name, root, parameter="f32[1000]", result="f32[1000]", before=""):
    return f"\n%{name} (p: {parameter}) -> {result} {{\n  %p = {parameter} parameter(0)\n{before}  ROOT {root}\n}}\n"


def of_parameter(line):
    return line.strip().replace("dot.1", "p")


def usual(late=0, name="all-reduce.1"):
    """A product of 5 ms, then an all-reduce of 3 ms after the last rank, which is 8 ms late."""
    return [("dot.1", late, late + 5), (name, late + 5, 16), ("dot.2", 16, 17)]


def read(tmp_path, *hosts):
    """Read the profiles of hosts of one job."""
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    for k, host in enumerate(hosts):
        (folder / f"host-{k}.xplane.pb").write_bytes(host)
    return read_folder(tmp_path)


def check(profile, text, *ms, runs=12, step=20, notes=(), **compiled):
    """It has these runs, whose steps and collectives take so many milliseconds."""
    found, said = times_in(profile, text, **compiled)
    assert (found.runs, said) == (runs, notes)
    assert step is None or found.step_seconds == approx(step / 1e3)
    assert [row.transfer for row in found.times] == approx([x / 1e3 for x in ms])
    return found


BACKENDS = {
    "TPU": tpu,
    "GPU": gpu,
    "CPU": cpu,
    "GPU without launches": functools.partial(gpu, launches=False),
}
on_every_backend = pytest.mark.parametrize("write", BACKENDS.values(), ids=BACKENDS)


@on_every_backend
@pytest.mark.parametrize("both_ways", [False, True], ids=["host-1", "host-0"])
def test_late_host_is_named(write, both_ways, tmp_path):
    hosts = [write(steps(*usual(8 * (late != both_ways)))) for late in (False, True)]
    found = read(tmp_path, *(host + programs(hlo(devices=4)) + task() for host in hosts))
    (report,) = found.reports
    times = report.measured
    assert (report.wire_bytes, times.runs, times.ranks, found.notes) == (6000, 12, (0, 1), ())
    ((last, _),) = times.late
    assert (last.rank, last.share, last.seconds) == (1 - both_ways, 1.0, approx(8e-3))
    (row,) = times.times
    assert row.transfer == approx(3e-3)
    assert sorted(row.waiting) == approx([0, 8e-3])
    assert (times.step_seconds, times.exposed_seconds) == (approx(20e-3), approx(7e-3))
    assert (row.algbw, row.busbw) == approx((4000 / 3e-3, 6000 / 3e-3))


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(BACKENDS)),
    st.integers(1, 3),
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=5),
    st.booleans(),
)
def test_every_form_says_the_same(backend, devices, runs, sizes, is_cut):
    body, ops, at = [], [("dot.1", 0, 1)], 1
    for k, (computing, sending) in enumerate(sizes):
        body += [
            f"  %fusion.{k} = f32[1000]{{0}} multiply(%x, %x)",
            f"  %psum.{k} = f32[1000]{{0}} all-reduce(%fusion.{k}), {REDUCE}",
        ]
        ops += [(f"fusion.{k}", at, at + computing), (f"psum.{k}", at + computing, at + computing + sending)]  # fmt: skip
        at += computing + sending
    executions = steps(*ops, ("dot.2", at, at + 1), runs=runs, devices=devices, step=70 * MS)
    if is_cut:  # the profile begins inside the first run
        executions = [e for e in executions if e.run or e.name not in ("dot.1", "psum.0")]
    text, whole, sent = hlo("\n".join(body), devices=devices), runs - is_cut, [x for _, x in sizes]
    step = 70 if whole > 2 else None
    found = check(BACKENDS[backend](executions, number=5), text, *sent, runs=whole, step=step, number=5)  # fmt: skip
    assert (found.ranks, found.exposed_seconds) == ((0,), approx(sum(sent) / 1e3))


@on_every_backend
def test_turns_and_calls_are_no_runs(write):
    check(write(steps(*TURNS)), LOOPED, 4)
    ops = [("dot.1", 0, 1), ("dot.2", 13, 14)]
    for t in (1, 4, 7, 10):
        ops += [("fusion.8", t, t + 1), ("all-reduce.7", t + 1, t + 2), ("fusion.9", t + 2, t + 3)]
    check(write(steps(*sorted(ops, key=lambda op: op[1]))), LOOPED, 4)
    before = computation("twice", of_parameter(PLAIN))
    calls = [f"  %call.{k} = f32[1000] call(%x), to_apply=%twice" for k in range(2)]
    ops = [("dot.1", 0, 1), ("all-reduce.1", 1, 3), ("all-reduce.1", 3, 4), ("dot.2", 4, 5)]
    check(write(steps(*ops)), hlo("\n".join(calls), before=before), 3, 3)


@on_every_backend
def test_parts_of_runs_are_unmeasured(write):
    half = [e for e in steps(*TURNS, runs=2) if 7 * MS < e.start < 25 * MS]
    bare = steps(("dot.1", 0, 1), ("dot.2", 1, 2), runs=2)  # no collective among it
    for executions, text in ((half, LOOPED), (bare, hlo())):
        found, notes = times_in(write(executions), text)
        assert found is None
        assert "no run is whole in the profile" in notes[-1]


@on_every_backend
@pytest.mark.parametrize("runs", [1, 2, 12])
@pytest.mark.parametrize("names", [(), ("all-reduce.1",)], ids=["alone", "with another"])
def test_first_collective_belongs_to_run(write, runs, names):
    first = PLAIN.replace(".1", ".9").replace("dot.9", "x")
    text = hlo(PLAIN if names else "").replace("  %dot.1 =", f"{first}\n  %dot.1 =")
    ops = [("all-reduce.9", 0, 2), ("dot.1", 2, 5), *((x, 5, 8) for x in names), ("dot.2", 8, 9)]
    cut = [e for e in steps(*ops, runs=runs + 1) if e.run < runs or e.name == "all-reduce.9"]
    check(write(cut), text, *(2, 3)[: 1 + len(names)], runs=runs + (not names), step=None)


@on_every_backend
def test_windows_count_the_same_runs(write):
    others = write(steps(("dot.1", 0, 1), runs=40), module="jit_other")
    assert count_runs(write(steps(*usual())), [Compiled(hlo(), 7)]) == (72, 12)
    assert count_runs(others, [Compiled(hlo(), 7)]) == (80, 0)


class TestOfTpus:
    @pytest.mark.parametrize("runs", [1, 2])
    def test_few_runs_have_their_length(self, runs):
        check(tpu(steps(*usual(), runs=runs)), hlo(), 11, runs=runs, step=17)

    def test_fusion_stands_for_its_collective(self):
        inner = f"  %zero = s32[] constant(0)\n  %all-reduce.9 = f32[1000]{{0}} all-reduce(%p), {REDUCE}\n"
        root = (
            "%slice.5 = f32[250]{0} dynamic-slice(%all-reduce.9, %zero), dynamic_slice_sizes={250}"
        )
        before = computation("scatter.1", root, result="f32[250]", before=inner)
        body = f"""  %fusion.107 = f32[250]{{0}} fusion(%dot.1), kind=kCustom, calls=%scatter.1
  %all-gather.16 = f32[1000]{{0}} all-gather(%fusion.107), {REDUCE.partition(", to_apply")[0]}, dimensions={{0}}"""
        events = steps(("dot.1", 0, 5), ("fusion.107", 5, 8), ("all-gather.16", 8, 10))
        found = check(tpu(events), hlo(body, before=before), 3, 2)
        assert found.exposed_seconds == approx(5e-3)

    def test_chain_lasts_start_to_end(self):
        ends = {"begin": "AsyncCollectiveStart", "go_on": "", "finish": "AsyncCollectiveDone"}
        before, gather = "", 'f32[1000]{0} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}'  # fmt: skip
        for name, target in ends.items():
            end = f'custom-call(%g.{name}), custom_call_target="{target}"' if target else f"copy(%g.{name})"  # fmt: skip
            root, inner = f"%end.{name} = f32[1000]{{0}} {end}", f"  %g.{name} = {gather}\n"
            before += computation(name, root, "f32[250]", before=inner)
        sites = {"async-collective-start": "begin", "fusion.4": "go_on", "async-collective-done": "finish"}  # fmt: skip
        body = "\n".join(f"  %{site} = f32[1000]{{0}} fusion(%s), kind=kCustom, calls=%{name}" for site, name in sites.items())  # fmt: skip
        body = "  %s = f32[250]{0} slice(%dot.1), slice={[0:250]}\n" + body
        events = steps(("dot.1", 0, 1), ("async-collective-start", 1, 1.001), ("fusion.4", 2, 5), ("async-collective-done", 5, 9))  # fmt: skip
        found, _ = times_in(tpu(events), hlo(body, before=before))
        (row,) = {row.rows: row for row in found.times if row}.values()
        assert (row.transfer, found.exposed_seconds) == approx((8e-3, 4.001e-3))

    def test_wait_in_done_is_exposed(self):
        ops = ("all-reduce-start.1", 0, 0.000004), ("dot.1", 0.1, 2), ("all-reduce-done.1", 2, 6)
        background = [(MS + 20 * MS * k, 5 * MS + 20 * MS * k) for k in range(12)]
        found = check(tpu(steps(*ops), background=background), hlo(PAIR), 6)
        assert found.exposed_seconds == approx(4e-3, rel=1e-4)

    def test_fingerprint_tells_equal_names_apart(self, tmp_path):
        texts = hlo(), hlo().replace("f32[1000]", "f32[2000]")
        long = [e._replace(run=e.run + 12, start=e.start + 900 * MS, end=e.end + 900 * MS) for e in steps(*usual(), step=200 * MS)]  # fmt: skip
        planes = tpu(steps(*usual()) + long, number=lambda run: 7 + (run > 11))
        found = read(tmp_path, planes + programs(*texts) + task())
        assert [r.measured.runs for r in found.reports] == [12, 12]
        assert [r.measured.step_seconds for r in found.reports] == approx([0.02, 0.2])
        assert [r.wire_bytes for r in found.reports] == [4000, 8000]
        assert found.notes == ()

    def test_device_runs_join_by_time(self):
        events = steps(*usual(), devices=4)
        # One device was recorded later, and another ended earlier.
        kept = [e for e in events if not (e.device == 1 and e.run < 2) and (e.device, e.run) != (2, 11)]  # fmt: skip
        check(tpu(kept), hlo(devices=4), 11, runs=9)


class TestOfGpus:
    @pytest.mark.parametrize("name", ["psum.28.1", "reduce-scatter.3"])
    def test_wrapped_kernels_bear_inner_names(self, name):
        wrapped = {"all-reduce-start.1": name}
        check(gpu(steps(*usual(name=name))), hlo(PAIR), 11, wrapped=wrapped)

    def test_program_says_the_wrapped_name(self, tmp_path):
        root = f"%scatter.3.1 = f32[250]{{0}} reduce-scatter(%p), {REDUCE}, dimensions={{0}}"
        body = """  %rs-start = ((f32[1000]), f32[250]) async-start(%dot.1), calls=%wrap
  %rs-done = f32[250]{0} async-done(%rs-start), calls=%wrap"""
        text = hlo(body, before=computation("wrap", root, result="f32[250]"))
        (report,) = read(tmp_path, gpu(steps(*usual(name="scatter.3.1"))) + programs(text)).reports
        assert report.measured.times[0].transfer == approx(11e-3)

    @pytest.mark.parametrize("kernels", [1, 2, 3])
    def test_kernels_may_lack_their_name(self, kernels):
        bare = {(3, "dot.1"), (5, "all-reduce.1"), (8, "dot.2")}
        check(gpu(steps(*usual()), kernels=kernels, bare=bare), hlo(), 11)
        check(gpu(steps(("all-reduce.1", 0, 3)), kernels=kernels), hlo(), 3)

    @pytest.mark.parametrize("period", [2, 4])
    @pytest.mark.parametrize("calls", [1, 2])
    def test_hidden_runs_are_left_out(self, calls, period):
        # In half of the runs the branch has no event, so that nothing is between two runs. With a
        # period of 2 nearly all runs are pairs.
        roots = (
            "%neg.1 = f32[1000] negate(%p)",
            "%neg.2 = f32[1000] negate(%p)",
            of_parameter(PLAIN),
        )
        before = "".join(map(computation, ("taken", "other", "sums"), roots))
        body = "  %k = pred[] constant(true)\n  %conditional.1 = f32[1000] conditional(%k, %x, %x), true_computation=%taken, false_computation=%other"  # fmt: skip
        lines = [body, *(f"  %c.{k} = f32[1000] call(%x), to_apply=%sums" for k in range(calls))]
        sums = [("all-reduce.1", 5 + 3 * k, 8 + 3 * k) for k in range(calls)]
        events = steps(("neg.1", 0, 1), *sums, ("dot.2", 12, 13))
        kept = [e for e in events if e.name != "neg.1" or e.run % period < period // 2]
        found, notes = times_in(gpu(kept), hlo("\n".join(lines), before=before))
        if found is None:
            assert period == 2
            assert "no run is whole" in str(notes)
        else:
            assert [row.transfer for row in found.times] == approx([3e-3 * calls] * calls)

    def test_ambiguous_kernel_costs_its_run(self):
        body = PLAIN + "\n" + PLAIN.replace(".1", ".2").replace("dot.2", "dot.1")
        ops = [("dot.1", 0, 5), ("all-reduce.1", 5, 8), ("all-reduce.2", 8, 10), ("dot.2", 10, 11)]
        check(gpu(steps(*ops), bare={(5, "all-reduce.1")}), hlo(body), 3, 2, runs=11)


class TestOfOldVersions:
    @pytest.mark.parametrize("devices", [1, 4])
    def test_rendezvous_says_the_run(self, devices):
        found, notes = times_in(old_cpu(steps(*usual(), devices=devices)), hlo(devices=4))
        assert (found.runs, found.step_seconds) == (12, approx(20e-3))
        assert found.times[0].transfer == approx(11e-3)
        assert notes == () if devices == 4 else "measured on 1 of its 4 devices" in notes[0]

    def test_oldest_have_device_threads(self):
        check(old_cpu(steps(*usual(), devices=4), is_oldest=True), hlo(devices=4), 11)

    def test_old_groups_are_kept(self, tmp_path):
        text = hlo(devices=8, groups="[4,2]<=[2,4]T(1,0)")
        module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
        old = with_old_groups(module)
        assert len(old) != len(module)
        (report,) = read(tmp_path, tpu(steps(*usual())) + programs(old)).reports
        assert report.rows[0].compiled.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
        assert report.wire_bytes == 4000


def with_old_groups(message, depth=0):
    """The HloModuleProto as XLA wrote it before JAX 0.9: field 87 holds what is field 92 now."""
    nested = {0: 3, 1: 2}.get(depth)
    content = b""
    for number, value in read_fields(message):
        if number == nested:
            value = with_old_groups(value, depth + 1)
        if depth == 2 and number == 92:
            number, value = 87, field(2, bytes(value))
        content += field(number, value if isinstance(value, int) else bytes(value))
    return content


def test_what_is_not_measured_is_named():
    two = hlo(PLAIN + "\n" + PLAIN.replace(".1", ".2").replace("dot.2", "dot.1"))
    starts = steps(("dot.1", 0, 5), ("all-reduce-start.1", 5, 6), ("dot.2", 6, 9))
    other = tpu(steps(*usual()), module="jit_other")
    lost = "jit_step: 1 of its {} collectives have no event, or no end, in the profile"
    for profile, text, transfers, *words in (
        (gpu(steps(*usual())), two, [approx(11e-3), None], lost.format(2), "(all-reduce.2): CUDA graphs hide collectives: set XLA_FLAGS="),
        (tpu(starts), hlo(PAIR), [None], lost.format(1)),
        (other, hlo(), None, "jit_step: not measured: no run is whole in the profile: record several."),
        (cpu([]), hlo(), None, "no executions of instructions: on CPUs, JAX before 0.7"),
    ):  # fmt: skip
        found, (note,) = times_in(profile, text)
        assert (found and [row and row.transfer for row in found.times]) == transfers
        assert all(word in note for word in words), note


def test_missing_devices_are_counted(tmp_path):
    module = _hlo.hlo_module_from_text(hlo(groups="{{0,1},{2,3}}"))
    for devices, program in ((8, hlo(devices=8)), (4, module.as_serialized_hlo_module_proto())):
        found = read(tmp_path / str(devices), tpu(steps(*usual())) + programs(program))
        assert f"measured on 2 of its {devices} devices" in found.notes[0]


def test_log_folders_are_ranks(tmp_path):
    for rank in range(2):
        for time, runs in (("2026_01_01", 5), ("2026_02_02", 12)):
            folder = tmp_path / f"rank{rank}" / "plugins" / "profile" / time
            folder.mkdir(parents=True)
            profile = cpu(steps(*usual(8 * rank), runs=runs, devices=1), rank=rank)
            (folder / "node.xplane.pb").write_bytes(profile + programs(hlo()) + task())
    (report,) = read_folder(tmp_path).reports
    assert (report.measured.ranks, report.measured.runs) == ((0, 1), 12)
    assert [last.rank for last, _ in report.measured.late] == [1]


WHOLE = tpu(steps(*usual())) + programs(hlo())
DAMAGED = {
    "empty": b"",
    "foreign": b"hello",
    "gzip": b"\x1f\x8b\x08\x00" + bytes(60),
    "a program": _hlo.hlo_module_from_text(hlo()).as_serialized_hlo_module_proto(),
    "half": WHOLE[: len(WHOLE) // 2],
    "re-encoded": WHOLE.decode("latin1").encode(),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_costs_one_line(content, tmp_path):
    (tmp_path / "bad.xplane.pb").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.xplane\.pb: this is not a JAX profile") as error:
        read_folder(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "good.xplane.pb").write_bytes(WHOLE)
    found = read_folder(tmp_path)
    assert found.reports[0].measured.runs == 12
    assert found.unread == (str(error.value),)
    assert json.loads(found.to_json())["unread"] == list(found.unread)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
@example(398, 0)  # a name that is the number 26,000,000,000
def test_damage_raises_only_value_errors(at, byte):
    for damaged in (WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :], WHOLE[:at]):
        with contextlib.suppress(ValueError):
            read_profile(damaged)


def test_command_ends_with_2(tmp_path):
    (tmp_path / "good.xplane.pb").write_bytes(WHOLE)
    (tmp_path / "bad.xplane.pb").write_bytes(WHOLE[:-9])
    words = ("jaxcoll", "inspect", "--profile", tmp_path)
    done = forks.with_commands().run(forks.COMMAND, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "bad.xplane.pb: this is not a JAX profile" in done.stderr
    assert "measured in 12 runs" in done.stdout


def test_distant_profiles_are_not_compared(tmp_path):
    hosts = [gpu(steps(*usual(), runs=12 + k)) + programs(hlo()) + task(10**18 * (k + 1)) for k in range(2)]  # fmt: skip
    found = read(tmp_path, *hosts)
    assert found.reports[0].measured is None
    assert "share no run" in found.notes[0]


def test_missing_programs_are_explained(tmp_path):
    with pytest.raises(ValueError, match="contain no communicating program"):
        read(tmp_path, tpu(steps(*usual())))


TWO_SHAPES = """
import sys, jax, numpy as np
mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
rows = jax.NamedSharding(mesh, jax.P("data"))
total = jax.jit(lambda x: x.sum(0))
xs = [jax.device_put(np.ones((n, 50), "f"), rows) for n in map(int, sys.argv[2:])]
jax.block_until_ready([total(x) for x in xs])
with jax.profiler.trace(sys.argv[1]):
    for _ in range(6):
        jax.block_until_ready([total(x) for x in xs])
"""


@pytest.mark.parametrize(("rows", "loaded"), [((2, 4), 2), ((4, 6), 0)], ids=["unlike", "alike"])
def test_equal_names_are_told_apart(rows, loaded, tmp_path):
    # The second process loads what the first has compiled: its executions have the numbers of then.
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for run, count in (("compiles", 2), ("loads", loaded)):
        command = [sys.executable, "-c", TWO_SHAPES, tmp_path / run, *map(str, rows)]
        subprocess.run(command, env=os.environ | settings, timeout=120, check=True)
        programs = read_folder(tmp_path / run)
        measured = [r.measured.runs for r in programs.reports if r.measured]
        assert len(measured) == count, (run, programs.notes)
        assert min(measured, default=5) >= 5
        assert ("JAX_ENABLE_COMPILATION_CACHE=0" in str(programs.notes)) == (count == 0)


def test_a_step_is_measured():
    @jc.data_parallel(donate_argnums=0)
    def step(w, x):
        return w - 0.1 * jc.grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)

    report = jc.inspect(step, np.ones((16, 4), "f"), np.ones((32, 16), "f"), measure=4)
    assert (report.measured.ranks, report.measured.late) == ((0,), ())
    assert report.measured.runs >= 3
    (times,) = report.measured.times
    assert 0 < times.transfer < report.measured.step_seconds
    assert "measured in" in str(report)
    assert "transfer" in str(report)
    assert report.to_dict()["measured"]["runs"] == report.measured.runs
    assert report.requested is not None


def test_impossible_measures_are_refused():
    step, x = jax.jit(lambda x: x * 2), np.ones(8, "f")
    for argument, options, words in [
        (jax.ShapeDtypeStruct((8,), "float32"), {"measure": 3}, "arrays as its arguments"),
        (x, {"measure": 3, "topology": "h100:8"}, "without a topology"),
        (x, {"measure": -1}, "at least 0"),
        (x, {"measure": 2.5}, "at least 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            jc.inspect(step, argument, **options)
    with pytest.raises(ValueError, match="at least 0"), jc.inspecting(measure=-1):
        pass


def test_block_is_read_at_its_end():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    with pytest.raises(KeyError), jc.inspecting() as programs:  # noqa: PT012
        jax.jit(lambda x: (x - 3).sum())(jax.device_put(np.ones((8, 7), "f"), rows))
        with pytest.raises(AssertionError, match="filled when its block ends"):
            jc.assert_collectives(programs, max_count=0)
        raise KeyError
    quiet = programs.quiet
    jax.jit(lambda x: x * 6)(np.ones(9, "f"))
    assert programs.quiet == quiet, "it leaves nothing behind"
    assert jc.assert_collectives(programs, max_count=1, kinds=["all-reduce"]) is programs
    with pytest.raises(AssertionError, match=r"jit__lambda exceeds .*\n.*max_count=0, found 1"):
        jc.assert_collectives(programs, max_count=0)
    assert "1 all-reduce" in str(programs)
