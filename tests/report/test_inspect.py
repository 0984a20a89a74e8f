"""Programs of many kinds: what the report says of them, and what an independent count says."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxcoll as jc

P = PartitionSpec


def S(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


WHOLE = P()
GRID = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2
)


def mapped(function, out_specs=WHOLE):
    mesh = Mesh(np.array(jax.devices()), ("d",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=out_specs))


def varying(x):
    return lax.pcast(x, "d", to="varying")


def turns(length, inside):
    return lambda x: lax.scan(lambda c, _: (inside(c), None), x, None, length=length)[0]


def summed(x):
    return varying(jnp.tanh(lax.psum(x, "d")))


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None]) ** 2)


PARAMS = {"w": S(4, 16), "v": S(16, 2), "b": S(2)}


def train(params, x):
    value, grads = jc.value_and_grad(loss, "data")(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def pmapped(params, x):
    # As flax's examples have it: a mean of the gradients, and of the metrics apart.
    value, grads = jax.value_and_grad(loss)(params, x)
    grads = lax.pmean(grads, "batch")
    metrics = lax.pmean({"loss": value, "norm": optax.tree.norm(grads)}, "batch")
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), metrics


def branching(x):
    some = lax.psum(jnp.sum(x), "d") > 0
    return lax.cond(some, lambda x: lax.psum(x, "d"), lambda _: jnp.zeros((1, 64)), x)


def sparse(x):
    slices = jc.IndexedSlices(x, jnp.arange(2), (100, 3))
    total = jc.all_reduce("sum", slices, "data")
    return total.values, total.indices


def step_with(**options):
    return jc.data_parallel(train, options=jc.CommunicationOptions(**options))


TREE = 4 * 16 + 16 * 2 + 2  # elements of the gradients; the loss travels with them


def native(*sizes):
    """Wire bytes of all-reduces of float32 over eight devices, by hand."""
    return sum(2 * (n - n // 8) * 4 for n in sizes)


PROGRAMS = {  # name: (function, arguments, collectives in one run by kind, wire bytes)
    "psum": (mapped(lambda x: lax.psum(x, "d")), [S(8, 100)], {"all-reduce": 1}, native(100)),
    "bfloat16": (
        mapped(lambda x: lax.psum(x, "d")), [S(8, 64, dtype=jnp.bfloat16)],
        {"all-reduce": 1}, native(64),
    ),
    "nothing": (mapped(lambda x: x * 2, P("d")), [S(8, 3)], {}, 0),
    "scan and after": (
        mapped(lambda x: lax.psum(turns(4, summed)(x), "d")), [S(8, 256)],
        {"all-reduce": 5}, 5 * native(256),
    ),
    "cond": (mapped(branching), [S(8, 64)], {"all-reduce": 2}, native(1, 64)),
    "flax, by pmap": (
        jax.pmap(pmapped, "batch", in_axes=(None, 0)), [PARAMS, S(8, 2, 4)],
        None, native(4 * 16, 16 * 2, 2, 1, 1),
    ),
    "data_parallel": (
        jc.data_parallel(train), [PARAMS, S(8, 4)], {"all-reduce": 1},
        native(4 * 16, 16 * 2, 2, 1),
    ),
    "two packs": (
        step_with(bytes_per_pack=300), [PARAMS, S(8, 4)], {"all-reduce": 1}, None,
    ),
    "ring": (
        step_with(algorithm="ring", bytes_per_pack=1 << 20), [PARAMS, S(8, 4)],
        {"collective-permute": 14}, 14 * -(-(TREE + 1) // 8) * 4,
    ),
    "sparse": (
        jc.data_parallel(sparse), [S(16, 3)], {"all-gather": 2}, 7 * (2 * 3 * 4 + 2 * 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_figures_agree(name):
    """Counts are those of hlo/compare_hlo.py; these are a report's, beside bytes by hand."""
    _, _, kinds, wire = PROGRAMS[name]
    report = report_of(name)
    runs = Counter()
    for c in report.collectives:
        runs[c.kind] += c.trips
    assert kinds in (None, runs)
    assert wire in (None, report.wire_bytes)
    is_widened = name == "bfloat16"  # on a CPU
    assert (1 + is_widened) * report.requested_wire_bytes == report.wire_bytes
    assert (report.count == 1 and report.rows[0].changes == ("bf16 → f32",)) == is_widened
    assert report.uncounted == report.notes == report.dropped == ()
    assert all(row.requested for row in report.rows)
    if report.plans:
        assert report.wire_bytes == sum(plan.wire_bytes for plan in report.plans)
    data = json.loads(report.to_json())
    assert (data["runs"], data["wire_bytes"]) == (report.runs, report.wire_bytes)
    assert [row["compiled"]["kind"] for row in data["rows"]] == [c.kind for c in report.collectives]
    assert max(map(len, str(report).splitlines())) <= 120


def test_every_leaf_has_a_pack():
    report = jc.inspect(step_with(bytes_per_pack=64), PARAMS, S(8, 4))
    (row,), (plan,) = report.rows, report.plans
    assert row.changes == (f"merged {len(plan.packs)}",)
    assert set(row.leaves) == {leaf.path for leaf in plan.leaves}
    assert set(row.packs) == {f"{plan.name}/pack{k}" for k in range(len(plan.packs))}
    assert row.matched_by == "name"


def test_plans_have_distinct_names():
    plans = [jc.plan({"a": S(3), "b": S(n)}, axis_size=8) for n in (4, 4, 5)]
    assert plans[0].name == plans[1].name != plans[2].name


def test_shardings_alone_request_nothing():
    report = jc.inspect(jax.jit(jnp.sum, in_shardings=jax.NamedSharding(GRID, P("outer"))), S(64))
    assert report.requested == ()
    assert [row.changes for row in report.rows] == [("added by the compiler",)]


def test_nothing_runs_traces_are_new():
    seen = []

    @jax.jit
    def program(x):
        jax.debug.callback(seen.append, x.sum())
        return x

    jc.inspect(program, S(3))
    assert seen == []
    step = jc.data_parallel(train)
    args = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), (PARAMS, S(8, 4)))
    step(*args)
    assert len(jc.inspect(step, *args).plans) == 1


def test_the_picture(tmp_path):
    for name, path in (("scan and after", tmp_path / "a.png"), ("nothing", None)):
        assert report_of(name).plot(path).get_size_inches().tolist() == [12.8, 7.2]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "program", ["cpu-0.12.0.1-kinds", "gpu-0.12.0.1-packs", "v6e-0.12.0.1-layers"]
)
def test_picture_words_do_not_overlap(program):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second

    golden = GOLDEN / f"{program}.hlo"
    figure = jc.inspect(golden.read_text()).plot()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    words = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    boxes = [text.get_window_extent(renderer) for text in words]
    shares = [text.get_text() for text in words if "%" in text.get_text()]
    assert len(shares) == 2
    assert all(share.endswith(" %") for share in shares)
    for k, (word, box) in enumerate(zip(words, boxes, strict=True)):
        assert box.x0 >= 0, word.get_text()
        assert box.x1 <= figure.bbox.x1, word.get_text()
        for other, beside in zip(words[:k], boxes[:k], strict=True):
            assert not box.padded(-2).overlaps(beside), (word.get_text(), other.get_text())


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxcoll._report.picture", None)
    with pytest.raises(ImportError, match="needs matplotlib, which is not installed: pip install"):
        report_of("nothing").plot()


def report_of(name):
    function, arguments, *_ = PROGRAMS[name]
    return jc.inspect(function, *arguments)


GOLDEN = Path(__file__).parent / "golden"


def test_kept_limits_return_the_report():
    report = report_of("psum")
    kept = jc.assert_collectives(
        report, max_count=1, max_wire_bytes=native(100), max_operands=1,
        none_in_loops=True, dtypes="f32", kinds=["all-reduce"],
    )  # fmt: skip
    assert kept is report
    jc.assert_collectives(report_of("nothing"), max_count=0)


def test_exceeded_limit_prints_the_report():
    report = report_of("scan and after")
    for limits, words in [
        ({"max_count": 4}, r"max_count=4, found 5 in one run\."),
        ({"max_wire_bytes": 10}, r"max_wire_bytes=10, found 8,960 in one run\."),
        ({"max_operands": 0}, r"max_operands=0, found 1 operand in #0, #1\."),
        ({"none_in_loops": True}, r"none_in_loops=True, found loop while[.\d]* in #0\."),
        ({"dtypes": ["bf16"]}, r"dtypes=\['bf16'\], found f32 in #0, #1\."),
        ({"kinds": ["all-gather"]}, r"kinds=\['all-gather'\], found all-reduce in #0, #1\."),
    ]:
        with pytest.raises(AssertionError, match=words) as caught:
            jc.assert_collectives(report, **limits)
        assert str(caught.value).endswith(f"\n\n{report}")


def test_what_is_unknown_keeps_no_limit():
    text = (GOLDEN / "v6e-0.12.0.1-loop.hlo").read_text()
    report = jc.inspect(text.replace("direction=LT", "direction=EQ"))
    for limit in ("max_count", "max_wire_bytes"):
        with pytest.raises(AssertionError, match="(?s)found at least .*no known trip count"):
            jc.assert_collectives(report, **{limit: 1 << 30})
    jc.assert_collectives(report, kinds=["all-reduce"], dtypes=["f32"])
    assert "≥ 2 all-reduces, ≥ 2.05 kB, f32; ≥ 3.58 kB wire bytes" in str(report)
    report = dataclasses.replace(report_of("nothing"), unread=("`all-shuffle` moves data",))
    for limit in ({"max_count": 9}, {"none_in_loops": True}, {"kinds": []}, {"dtypes": []}):
        with pytest.raises(AssertionError, match="not counted: `all-shuffle` moves data"):
            jc.assert_collectives(report, **limit)


def test_invalid_limits_are_refused():
    report = report_of("psum")
    for given, limits, error, words in [
        (report, {"max_cuont": 0}, TypeError, "unexpected keyword argument 'max_cuont'"),
        (report, {}, ValueError, "needs a limit, one or more of max_count, .*kinds; got none"),
        (report, {"none_in_loops": False}, ValueError, "needs a limit"),
        (report, {"max_count": -1}, ValueError, "`max_count` must be None or an integer"),
        (report, {"max_operands": "2"}, ValueError, "`max_operands` must be None or an integer"),
        (report, {"max_count": True}, ValueError, "`max_count` must be None or an integer"),
        (report, {"kinds": ["psum"]}, ValueError, "`kinds` may name all-reduce.*got 'psum'"),
        (report, {"dtypes": [3]}, ValueError, "`dtypes` may name element types of HLO.*got 3"),
        (report, {"dtypes": ["bfloat16"]}, ValueError, "such as f32, bf16; got 'bfloat16'"),
        (abs, {"max_count": 1}, TypeError, r"expects a report, as in .*inspect\(step.*got builtin"),
    ]:
        with pytest.raises(error, match=words):
            jc.assert_collectives(given, **limits)


def test_mesh_argument_gets_all_devices():
    def step(x, *, mesh):
        f = lambda x: lax.psum(x, "data")
        return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    assert jc.inspect(step, np.ones(8, np.float32)).devices == 8


@pytest.mark.parametrize("donated", [(), (0,)])
def test_memory_is_sum_of_buffers(donated):
    program = jax.jit(lambda x: x * 2, donate_argnums=donated)
    report = jc.inspect(program, S(1000))
    assert report.memory_bytes == 4000 * (2 - len(donated))
    assert f"memory: at most {4 * (2 - len(donated))}.00 kB per device" in str(report)
    assert jc.inspect(program.lower(S(1000)).compile().as_text()).memory_bytes is None
