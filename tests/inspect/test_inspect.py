"""Programs of many kinds: what the report says of them, and what an independent count says."""

import re
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
from matplotlib.backends.backend_agg import FigureCanvasAgg

import jaxcoll as jc
from jaxcoll import _inspect
from jaxcoll._observe.parse.stablehlo import read_stablehlo
from jaxcoll._step.lowering import texts_of

P = PartitionSpec


def S(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


WHOLE = P()


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


def with_optax(params, x):
    value, grads = jc.value_and_grad(loss, "data")(params, x)
    optimizer = optax.adam(1e-3)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), value


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
    "pmean of a tree": (
        mapped(lambda x: lax.pmean({"a": x, "b": x[:, :3]}, "d")), [S(8, 100)],
        {"all-reduce": 1}, native(100, 3),
    ),
    "all_gather": (
        mapped(lambda x: lax.all_gather(x, "d", tiled=True), P("d")), [S(8, 16)],
        {"all-gather": 1}, 7 * 64,
    ),
    "psum_scatter": (
        mapped(lambda x: lax.psum_scatter(x, "d", tiled=True), P("d")), [S(64, 16)],
        {"reduce-scatter": 1}, 7 * 64,
    ),
    "all_to_all": (
        mapped(lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), P("d")), [S(64, 16)],
        {"all-to-all": 1}, 7 * 64,
    ),
    "ppermute": (
        mapped(lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]), P("d")),
        [S(8, 16)], {"collective-permute": 1}, 64,
    ),
    "bfloat16": (
        mapped(lambda x: lax.psum(x, "d")), [S(8, 64, dtype=jnp.bfloat16)],
        {"all-reduce": 1}, native(64),
    ),
    "nothing": (mapped(lambda x: x * 2, P("d")), [S(8, 3)], {}, 0),
    "scan": (mapped(turns(7, summed), P("d")), [S(8, 256)], {"all-reduce": 7}, 7 * native(256)),
    "scan in a scan": (
        mapped(turns(5, lambda x: turns(3, summed)(x) + 1.0), P("d")), [S(8, 256)],
        {"all-reduce": 15}, 15 * native(256),
    ),
    "scan and after": (
        mapped(lambda x: lax.psum(turns(4, summed)(x), "d")), [S(8, 256)],
        {"all-reduce": 5}, 5 * native(256),
    ),
    "cond": (mapped(branching), [S(8, 64)], {"all-reduce": 2}, native(1, 64)),
    "jit in jit": (
        mapped(lambda x: jax.jit(summed)(jax.jit(summed)(x)), P("d")), [S(8, 32)],
        {"all-reduce": 2}, 2 * native(32),
    ),
    "flax, by pmap": (
        jax.pmap(pmapped, "batch", in_axes=(None, 0)), [PARAMS, S(8, 2, 4)],
        None, native(4 * 16, 16 * 2, 2, 1, 1),
    ),
    "data_parallel": (
        jc.data_parallel(train), [PARAMS, S(8, 4)], {"all-reduce": 1},
        native(4 * 16, 16 * 2, 2, 1),
    ),
    "optax": (
        jc.data_parallel(with_optax), [PARAMS, S(8, 4)], {"all-reduce": 1},
        native(4 * 16, 16 * 2, 2, 1),
    ),
    "one pack": (
        step_with(bytes_per_pack=1 << 20), [PARAMS, S(8, 4)], {"all-reduce": 1},
        native(TREE + 1),
    ),
    "two packs": (
        step_with(bytes_per_pack=300), [PARAMS, S(8, 4)], {"all-reduce": 1}, None,
    ),
    "ring": (
        step_with(algorithm="ring", bytes_per_pack=1 << 20), [PARAMS, S(8, 4)],
        {"collective-permute": 14}, 14 * -(-(TREE + 1) // 8) * 4,
    ),
    "halving_doubling": (
        step_with(algorithm="halving_doubling", bytes_per_pack=1 << 20), [PARAMS, S(8, 4)],
        {"collective-permute": 6}, 14 * -(-(TREE + 1) // 8) * 4,
    ),
    "shuffle": (
        step_with(algorithm="shuffle", bytes_per_pack=1 << 20), [PARAMS, S(8, 4)],
        {"all-to-all": 2}, 14 * -(-(TREE + 1) // 8) * 4,
    ),
    "gather": (
        jc.data_parallel(lambda x: jc.all_gather(x, "data").sum()), [S(8, 4)],
        {"all-gather": 1}, 7 * 16,
    ),
    "broadcast": (
        jc.data_parallel(lambda x: jc.broadcast(x, "data", source=3)), [S(8, 4)],
        {"all-reduce": 1}, native(4),
    ),
    "sparse": (
        jc.data_parallel(sparse), [S(16, 3)], {"all-gather": 2}, 7 * (2 * 3 * 4 + 2 * 4),
    ),
}  # fmt: skip


# A second reader of compiled text, as simple as can be: it counts what stands there.
BITS = {"pred": 8, "s8": 8, "u8": 8, "s32": 32, "u32": 32, "bf16": 16, "f16": 16, "f32": 32}
OPERATION = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)"
)


def kinds_and_bytes(text):
    """Each collective's kind, how often, and the bytes of its operands in all."""
    types = dict(re.findall(r"%([\w.\-]+) = (\w+\[[\d,]*\])", text))
    kinds, nbytes = Counter(), 0
    for kind, operands in OPERATION.findall(text):
        kinds[kind] += 1
        for name in re.findall(r"%([\w.\-]+)", operands):
            dtype, dims = re.fullmatch(r"(\w+)\[([\d,]*)\]", types[name]).groups()
            size = 1
            for dim in filter(None, dims.split(",")):
                size *= int(dim)
            nbytes += size * BITS[dtype] // 8
    return kinds, nbytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_and_bytes_are_those_of_an_independent_count(name, monkeypatch):
    function, arguments, kinds, wire = PROGRAMS[name]
    texts = []
    monkeypatch.setattr(_inspect, "texts_of", lambda *of: texts.append(texts_of(*of)) or texts[-1])
    report = jc.inspect(function, *arguments)
    runs = Counter()
    for c in report.collectives:
        runs[c.kind] += c.trips
    if kinds is not None:
        assert runs == kinds
    if wire is not None:
        assert report.wire_bytes == wire
    widened = 2 if name == "bfloat16" else 1
    assert widened * report.requested_wire_bytes == report.wire_bytes
    asked = read_stablehlo(function.lower(*arguments).as_text())
    assert [(c.kind, c.operands) for c in asked] == [(c.kind, c.operands) for c in report.requested]
    once, nbytes = kinds_and_bytes(texts[0].compiled)
    assert once == Counter(c.kind for c in report.collectives)
    assert nbytes == sum(c.nbytes for c in report.collectives)
    assert report.uncounted == report.notes == report.dropped == ()
    assert all(origin.requested for origin in report.origins)
    if report.plans and "gather" not in name:
        assert report.wire_bytes == sum(plan.wire_bytes for plan in report.plans)
    assert jc.Report.from_json(report.to_json()) == report
    assert max(map(len, str(report).splitlines())) <= 120
    assert report.name in report._repr_html_()


def test_every_leaf_of_a_step_is_found_in_a_pack():
    report = jc.inspect(step_with(bytes_per_pack=64), PARAMS, S(8, 4))
    assert report.changes(0) == (f"merged {len(report.plans[0].packs)}",)
    assert set(report.leaves_of(0)) == {leaf.path for leaf in report.plans[0].leaves}
    assert {pack.name for pack in report.packs} == set(report.packs_of(0))
    assert report.origins[0].by == "name"


def test_a_plan_has_one_name_and_another_plan_another():
    plans = [jc.plan({"a": S(3), "b": S(n)}, axis_size=8) for n in (4, 4, 5)]
    assert plans[0].name == plans[1].name != plans[2].name


def test_what_is_narrow_on_a_cpu_is_widened_and_said_so():
    function, arguments, *_ = PROGRAMS["bfloat16"]
    assert jc.inspect(function, *arguments).changes(0) == ("bf16 → f32",)


def test_a_loop_is_named_and_its_requested_turns_are_known():
    function, arguments, *_ = PROGRAMS["scan and after"]
    report = jc.inspect(function, *arguments)
    assert [len(c.loops) for c in report.collectives] == [1, 0]
    assert [report.requested_trips(i) for i in (0, 1)] == [4, 1]
    assert report.requested_wire_bytes == report.wire_bytes
    assert [loop.trips for loop in report.loops] == [4]


def test_the_line_that_asks_is_known():
    def ask(x):
        return lax.psum(x, "d")

    (source,) = jc.inspect(mapped(ask), S(8, 3)).sources_of(0)
    assert source.startswith(__file__)


def test_each_form_of_a_program():
    function, arguments, *_ = PROGRAMS["psum"]
    lowered = function.lower(*arguments)
    compiled = lowered.compile()
    whole = jc.inspect(function, *arguments)
    assert jc.inspect(lowered).collectives == whole.collectives
    assert jc.inspect(compiled).requested is None
    assert jc.inspect(compiled.as_text()).collectives == jc.inspect(compiled).collectives
    assert jc.inspect(lambda x: x + 1, S(3)).count == 0


def test_nothing_runs_and_an_older_trace_is_not_taken():
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


def test_what_is_no_program_is_refused():
    function, arguments, *_ = PROGRAMS["psum"]
    lowered = function.lower(*arguments)
    for program, given, words in (
        (3, (), "`inspect` expects a function and its arguments.*got int"),
        (lowered, (1,), "got arguments for a program that was lowered with its own"),
        (lowered.compile().as_text(), (1,), "got arguments or a topology for a text"),
        (lowered.as_text(), (), "is StableHLO"),
    ):
        with pytest.raises(ValueError, match=words):
            jc.inspect(program, *given)
    with pytest.raises(ValueError, match=r"expected what `Report.to_json` writes; got '\[\]'"):
        jc.Report.from_json("[]")


def test_the_picture(tmp_path):
    function, arguments, *_ = PROGRAMS["scan and after"]
    for name in ("scan and after", "nothing", "data_parallel"):
        function, arguments, *_ = PROGRAMS[name]
        figure = jc.inspect(function, *arguments).plot(tmp_path / "a.png")
        assert figure.get_size_inches().tolist() == [12.8, 7.2]
    report = jc.inspect(function, *arguments)
    report.plot(tmp_path / "b.png", seconds=lambda c: c.wire_bytes / 1e9)
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png"}


@pytest.mark.parametrize(
    "program", ["cpu-0.12.0.1-kinds", "gpu-0.12.0.1-packs", "v6e-0.12.0.1-layers"]
)
def test_the_words_of_a_picture_lie_apart_and_on_the_page(program):
    golden = Path(__file__).parents[1] / f"observe/golden/{program}.hlo"
    figure = jc.inspect(golden.read_text()).plot()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    words = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    boxes = [text.get_window_extent(renderer) for text in words]
    for k, (word, box) in enumerate(zip(words, boxes, strict=True)):
        assert box.x0 >= 0, word.get_text()
        assert box.x1 <= figure.bbox.x1, word.get_text()
        for other, beside in zip(words[:k], boxes[:k], strict=True):
            assert not box.padded(-2).overlaps(beside), (word.get_text(), other.get_text())


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxcoll._observe.report_picture", None)
    function, arguments, *_ = PROGRAMS["nothing"]
    with pytest.raises(ImportError, match="needs matplotlib, which is not installed: pip install"):
        jc.inspect(function, *arguments).plot()


class TestLimits:
    def report(self, name):
        function, arguments, *_ = PROGRAMS[name]
        return jc.inspect(function, *arguments)

    def test_kept(self):
        function, arguments, *_ = PROGRAMS["psum"]
        report = jc.assert_collectives(
            function, *arguments, max_count=1, max_wire_bytes=native(100), max_operands=1,
            none_in_loops=True, dtypes="f32", kinds=["all-reduce"],
        )  # fmt: skip
        assert isinstance(report, jc.Report)
        assert jc.assert_collectives(self.report("nothing"), max_count=0).count == 0

    @pytest.mark.parametrize(
        ("limits", "words"),
        [
            ({"max_count": 4}, "max_count=4, found 5 collectives in one run:\n  all-reduce"),
            ({"max_wire_bytes": 10}, r"max_wire_bytes=10, found 8,960 wire bytes a device:"),
            ({"max_operands": 0}, "max_operands=0, found 1 in one:"),
            ({"none_in_loops": True}, "none_in_loops=True, found 1 collective in loops:"),
            ({"dtypes": ["bf16"]}, r"dtypes=\['bf16'\], found f32:"),
            ({"kinds": ["all-gather"]}, r"kinds=\['all-gather'\], found all-reduce:"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_passed(self, limits, words):
        with pytest.raises(AssertionError, match=words) as caught:
            jc.assert_collectives(self.report("scan and after"), **limits)
        assert "test_inspect.py:" in str(caught.value)

    def test_a_loop_of_unknown_turns_keeps_no_limit(self):
        golden = Path(__file__).parents[1] / "observe/golden/v6e-0.12.0.1-loop.hlo"
        text = golden.read_text().replace("direction=LT", "direction=NE")
        with pytest.raises(AssertionError, match="(?s)but that is not all:.*does not say how"):
            jc.assert_collectives(text, max_count=100)
        assert "at least" in str(jc.inspect(text))

    @pytest.mark.parametrize(
        ("limits", "words"),
        [
            ({"max_count": -1}, "`max_count` must be None or an integer"),
            ({"max_operands": "2"}, "`max_operands` must be None or an integer"),
            ({"kinds": ["psum"]}, "`kinds` may name all-reduce.*got 'psum'"),
            ({"dtypes": [3]}, "`dtypes` must be None or names"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_limits_that_are_none(self, limits, words):
        with pytest.raises(ValueError, match=words):
            jc.assert_collectives(self.report("psum"), **limits)


def test_a_function_that_takes_a_mesh_is_given_all_devices():
    def step(x, *, mesh):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )(x)

    assert jc.inspect(step, np.ones(8, np.float32)).devices == 8


@pytest.mark.parametrize("donated", [(), (0,)])
def test_memory_is_arguments_results_that_reuse_none_and_what_is_temporary(donated):
    program = jax.jit(lambda x: x * 2, donate_argnums=donated)
    report = jc.inspect(program, S(1000))
    assert report.memory_bytes == 4000 * (2 - len(donated))
    assert f"memory: {4 * (2 - len(donated))}.00 kB of a device at most" in str(report)
    assert jc.Report.from_json(report.to_json()).memory_bytes == report.memory_bytes
    assert jc.inspect(program.lower(S(1000)).compile().as_text()).memory_bytes is None
