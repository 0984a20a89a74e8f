"""Strategies: TensorFlow's cases, laws, and what is refused where."""

import copy
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CompileCounter, assert_trees_equal, devices
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll as jc
from jaxcoll._runtime.dispatch import run
from jaxcoll.distribute import Mirrored, PerReplica, get_replica_context
from jaxcoll.distribute import _along_axis as along_axis
from jaxcoll.distribute._replica_program import place_arguments, replica_program

NAMES = [f"cpu:{i}" for i in range(8)]
STRATEGIES = {
    "mirrored-1": jc.MirroredStrategy(NAMES[:1]),
    "mirrored-2": jc.MirroredStrategy(NAMES[:2]),
    "mirrored-3": jc.MirroredStrategy(NAMES[:3], jc.distribute.ReductionToOneDevice()),
    "mirrored-7": jc.MirroredStrategy(NAMES[:7]),
    "multi": jc.MultiWorkerMirroredStrategy(),
    "multi-ring": jc.MultiWorkerMirroredStrategy(
        communication_options=jc.CommunicationOptions(bytes_per_pack=64, implementation="ring")
    ),
}
# One replica; odd numbers, by an op that adds on one device and by the default; options of its own.
UNLIKE = ("mirrored-1", "mirrored-3", "mirrored-7", "multi-ring")
EVERY = pytest.mark.parametrize("s", [STRATEGIES[name] for name in UNLIKE], ids=UNLIKE)
TWO = pytest.mark.parametrize("s", [STRATEGIES["mirrored-2"], STRATEGIES["multi"]], ids=["2", "8"])
ONE = jc.MirroredStrategy(["cpu:0"])
PAIR = STRATEGIES["mirrored-2"]


def all_reduce(op, value, **settings):
    return get_replica_context().all_reduce(op, value, **settings)


def all_gather(value, axis):
    return get_replica_context().all_gather(value, axis)


def replica_id():
    return get_replica_context().replica_id_in_sync_group


def of_replica(s, fun):
    """A value for each replica, from its number."""
    return s.experimental_distribute_values_from_function(
        lambda context: fun(context.replica_id_in_sync_group)
    )


def local(s, value):
    """Every replica's value, as Python numbers."""
    results = s.experimental_local_results(value)
    assert len(results) == s.num_replicas_in_sync
    return [jax.tree.map(lambda x: np.asarray(x).tolist(), result) for result in results]


# Part A


@pytest.mark.tensorflow("A10", "A22")
def test_replica_functions_are_refused():
    """No array, a length of its own, or a vmap that takes the name of the replicas."""
    for error, fn, words in (
        (TypeError, lambda: jax.lax.cond(True, lambda: {1}, lambda: {2}), "not a valid JAX type"),
        (TypeError, lambda: [0] * replica_id(), "unsupported operand"),
        (TypeError, lambda: "x", "not a valid JAX array type"),
        *((ValueError, lambda size=size: jax.vmap(lambda v: jc.all_reduce("sum", v, "replica"), axis_name="replica")(
            jnp.zeros(size)), "a `vmap` here has taken the name of an axis of the mesh") for size in (3, 2)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            PAIR.run(fn)


@pytest.mark.tensorflow("A16", "A17", "A19", "A20", "A23")
@TWO
def test_local_results_have_replica_structure(s):
    result = lambda i: ({"a": 1, "b": 2}, (1, [2, 3]), {"a": 1.5, "b": (2.5,)}, i, {"a": i + 1})
    own = of_replica(s, result)
    assert isinstance(own[1][1][0], PerReplica)
    whole = PerReplica([result(i) for i in range(s.num_replicas_in_sync)], devices=s.devices)
    for value in (s.run(lambda: result(replica_id())), own, whole):
        assert isinstance(s.experimental_local_results(value), tuple)
        assert local(s, value) == [result(i) for i in range(s.num_replicas_in_sync)]
    assert s.experimental_local_results({"a": 1}) == ({"a": 1},), "plain values are themselves"


def test_misplaced_results_are_counted():
    one, two, three, four = devices(4)
    values = {(two, one): [2.0, 1.0], (two, three): [1.0, 2.0], (four, one): [1.0, 2.0]}
    for places, want in values.items():
        assert local(PAIR, PerReplica([1.0, 2.0], devices=places)) == want
    with pytest.raises(ValueError, match="has 2 replicas in this process, .* which has 3 here"):
        local(PAIR, PerReplica([1.0, 2.0, 3.0], devices=[two, three, four]))


# Part H


@pytest.mark.tensorflow("H10")
def test_strategies_are_not_mixed():
    other = STRATEGIES["mirrored-3"]
    with PAIR.scope(), PAIR.scope():
        for call in (
            lambda: other.reduce("sum", Mirrored([1.0]), axis=None),
            lambda: other.run(lambda: 1.0),
            lambda: other.gather(Mirrored([np.ones(1)]), axis=0),
            lambda: other.scope().__enter__(),
        ):
            with pytest.raises(RuntimeError, match="under the scope of another"):
                call()


@pytest.mark.tensorflow("H13", "H14", "H31")
def test_all_reduce_has_its_derivative():
    """y = all_reduce(x)·c: each replica's derivative is the all_reduce of the c."""
    outside = jnp.float32(42)

    def derivatives(c, argument, own):
        given = (jnp.float32(42), outside, argument, own)
        stopped = jax.grad(lambda v: jax.lax.stop_gradient(all_reduce("sum", v)) * c)(own)
        return [[jax.grad(lambda v, op=op: all_reduce(op, v) * c)(x) for x in given]
                for op in ("sum", "mean")], stopped  # fmt: skip

    out = PAIR.run(
        derivatives,
        (of_replica(PAIR, lambda i: 2.0 * i + 1), 42.0, of_replica(PAIR, lambda i: 42.0)),
    )
    assert local(PAIR, out) == [([[4] * 4, [2] * 4], 0)] * 2


@pytest.mark.tensorflow("K31")
@pytest.mark.tensorflow("H1", "H2", "H4", "H11", "H16", "H17", "H20", "H22", "H26")
@pytest.mark.tensorflow("J2", "J10", "J11", "J13", "J14", "L35")
@EVERY
def test_run_returns_values_and_sums(s):
    """A value counts once a replica wherever it was made; the rows of a table are one value."""
    n, outside = s.num_replicas_in_sync, jnp.float32(1)
    rows = lambda: jc.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (3, 1))

    def step(x, mirrored):
        own = jnp.float32(1), jnp.array([1.0, 2.0]), (x + 3, x + 1), replica_id().astype(x.dtype)
        anywhere = (jnp.float32(1), outside, x, mirrored, 1.0)
        return own, all_reduce("SUM", anywhere), [all_reduce(op, rows()) for op in ("sum", "mean")]

    with s.scope() as entered:
        assert entered is s
        (one, pair, nest, ident), sums, tables = s.run(
            step, (outside, Mirrored([1.0] * n, devices=s.devices))
        )
        total = s.reduce("sum", one, axis=None)
    assert total.devices() == {s.devices[0]}
    assert total == s.reduce("Sum", one, axis=None) == n
    assert s.reduce("MEAN", one, axis=None) == 1
    assert (s.reduce("mean", pair, axis=0), s.reduce("sum", pair, axis=0)) == (1.5, 3 * n)
    assert s.reduce("sum", nest, axis=None) == (4 * n, 2 * n)
    assert s.reduce("sum", ident, axis=None) == n * (n - 1) / 2
    assert local(s, sums) == [(n,) * 5] * n
    assert all(isinstance(x, Mirrored) for x in (one, *sums, *tables))
    assert [x[0].to_dense()[:, 0].tolist() for x in tables] == [[0, n, 0], [0, 1, 0]]


@pytest.mark.tensorflow("H32")
@TWO
def test_exceptions_reach_the_caller(s):
    def broken(x):
        all_reduce("sum", x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        s.run(broken, (1.0,))
    assert get_replica_context() is None


@pytest.mark.tensorflow("A7", "A8", "H34")
@pytest.mark.tensorflow("H28", "J1", "J5", "J7", "K28")
def test_runs_share_one_program():
    """As of a loop of training, whose parameters stay mirrored."""
    s, traces = STRATEGIES["mirrored-3"], []

    def step(w, batch, *, scale):
        traces.append(1)
        return w + scale * all_reduce("mean", batch.sum()), batch * scale

    few, many = (of_replica(s, lambda i, k=k: np.ones((k, 2), "f")) for k in (1, 3))
    w, other = s.run(step, (jnp.float32(1), few), {"scale": jnp.float32(2)})
    for batch, compiles in ((other, 0), (many, 1)):
        with CompileCounter() as compiled:
            for _ in range(5):
                w, batch = s.run(step, (w, batch), {"scale": jnp.float32(2)})
        assert (compiled.count, len(traces)) == (compiles, 1 + compiles)
    assert (type(w), type(batch)) == (Mirrored, PerReplica)
    assert w[0] == 1 + 4 * (2**6 - 1) + 12 * (2**5 - 1)


# Part I, J


@pytest.mark.tensorflow("B13", "B14", "B16", "I1", "I2", "I5")
def test_passed_ops_reduce():
    calls = []

    class Spy(jc.distribute.ReductionToOneDevice):
        def _prepare(self, *args):
            calls.append(1)
            return super()._prepare(*args)

    s = jc.MirroredStrategy(NAMES[:3], cross_device_ops=Spy())
    assert s.reduce("sum", of_replica(s, float), axis=None) == 3.0
    assert s.extended.reduce_to("Mean", of_replica(s, float), "cpu:5") == 1.0
    assert len(calls) == 2


@pytest.mark.tensorflow("J4", "J8", "J20")
@TWO
def test_update_runs_on_each_component(s):
    n = s.num_replicas_in_sync
    w = Mirrored([{"w": np.float32(1), "b": np.ones(2, "f")}] * n, devices=s.devices)
    add = lambda p, x: jax.tree.map(lambda v: v + x, p)
    w = s.extended.update(w, add, (6.0,))
    with CompileCounter() as compiled:
        w = s.extended.update(w, add, (2.0,))
    assert compiled.count == 0
    assert isinstance(w, Mirrored)
    assert local(s, w) == [{"w": 9.0, "b": [9.0, 9.0]}] * n
    own = of_replica(s, float)
    apart = s.extended.update(w, lambda p, *, x: {**p, "w": p["w"] * x}, kwargs={"x": own})
    assert isinstance(apart, PerReplica)
    assert local(s, apart) == [{"w": 9.0 * i, "b": [9.0, 9.0]} for i in range(n)]
    leaves = s.extended.update({"a": own, "w": w}, lambda v: {"a": v["a"] + 1, "w": v["w"]["w"]})
    assert [type(leaves[k]) for k in "aw"] == [PerReplica, Mirrored]


# Part K: gather


@pytest.mark.tensorflow("A13", "A14", "K1", "K2", "K4", "K10", "K11")
@TWO
def test_gathers_join_the_parts(s):
    """Inside; between programs the next test does."""
    n, x = s.num_replicas_in_sync, np.arange(12.0, dtype="f").reshape(2, 2, 3)
    gather = lambda x: {axis: all_gather([x + replica_id()], axis)[0] for axis in (0, 1, -1, 2)}
    with jax.numpy_dtype_promotion("standard"):
        inside = s.run(gather, (x,))
    for axis, value in inside.items():
        assert isinstance(value, Mirrored)
        for result in s.experimental_local_results(value):
            want = np.concatenate([x + i for i in range(n)], axis)
            np.testing.assert_array_equal(result, want)


@pytest.mark.tensorflow("H5", "H8", "K5", "L32", "L34", "L49", "L50")
@settings(max_examples=16)
@given(
    s=st.sampled_from([STRATEGIES[name] for name in UNLIKE]),
    op=st.sampled_from(["sum", "mean"]),
    axis=st.sampled_from([0, 1, -1, -2, (0, 2), [1, -3], (0, 1, 2)]),
    form=st.sampled_from(["even", "uneven", "copies"]),
    dtype=st.sampled_from(["float32", "int32", "float16", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_axis_reduction_equals_numpy(s, op, axis, form, dtype, seed):
    """Uneven shares are weighted by element; leaves of a tree are reduced and gathered alone."""
    n, rng = s.num_replicas_in_sync, np.random.default_rng(seed)
    first = np.atleast_1d(axis)[0]
    parts = []
    for _ in range(n):
        shape = [2, 3, 4]
        shape[first] = rng.integers(0 if parts else 1, 4) if form == "uneven" else 2
        parts.append(rng.integers(-4, 5, shape).astype(jnp.dtype(dtype)))
    if form == "copies":
        parts = parts[:1] * n
        value = Mirrored(parts, devices=s.devices)
    else:
        value = of_replica(s, parts.__getitem__)
    got = s.reduce(op, {"x": [value]}, axis)["x"][0]
    axes = tuple(np.atleast_1d(axis))
    want = sum(part.astype("f8").sum(axes) for part in parts)
    if op == "mean":
        want /= sum(np.prod([part.shape[k] for k in axes]) for part in parts)
    assert got.dtype == ("float32" if dtype == "int32" and op == "mean" else dtype)
    np.testing.assert_allclose(np.asarray(got, "f8"), want, rtol=1e-2, atol=1e-4)
    if isinstance(axis, int):
        np.testing.assert_array_equal(s.gather([value], axis)[0], np.concatenate(parts, axis))


def test_one_program_gathers_a_tree(monkeypatch):
    calls = []
    monkeypatch.setattr(along_axis, "run", lambda call: calls.append(call) or run(call))
    parts = {"even": [np.ones(2), np.zeros(2)], "uneven": [np.ones(1, "i4"), np.zeros(3, "i4")]}
    tree = {name: [of_replica(PAIR, rows.__getitem__)] for name, rows in parts.items()}
    got = PAIR.gather(tree | {"copies": Mirrored([7.0 * np.ones((1, 2), "f")] * 2)}, 0)
    assert got.pop("copies").tolist() == [[7, 7]] * 2
    assert {k: x.tolist() for k, (x,) in got.items()} == {
        "even": [1, 1, 0, 0],
        "uneven": [1, 0, 0, 0],
    }
    assert len(calls) == 1
    assert PAIR.gather({}, 0) == {}


def test_reductions_along_an_axis_have_limits(monkeypatch):
    """No rows at all, a sum that overflows though its mean does not, and a second call."""
    s = STRATEGIES["mirrored-3"]
    for rows in (np.zeros((0, 2), "f"), np.zeros((3, 2, 0), "f")):
        (batch,) = s.experimental_distribute_dataset([rows])
        np.testing.assert_array_equal(s.reduce("sum", batch, 0), rows.sum(0))
        assert np.isnan(s.reduce("mean", batch, 0)).all()
    half = of_replica(s, lambda i: np.full(i + 1, 60000, "f2"))
    for _ in range(2):
        mean = s.reduce("mean", half, 0)
        assert (mean.dtype, float(mean)) == (np.float16, 60000)
        monkeypatch.setattr(jax, "eval_shape", None)


@pytest.mark.tensorflow("K7", "K8")
def test_unfit_parts_show_both_shapes():
    for part, words in (
        (lambda i: np.ones((1, i + 1)), r"shape \(except along axis 0\) .* shape \(1, 2\) on replica 1, \(1, 1\) on r"),
        (lambda i: np.ones((1,) * (i + 1)), r"shape \(1, 1\) on replica 1, \(1,\) on replica 0"),
        (lambda i: np.ones(i + 1, "i4" if i == 1 else "f"), "dtype int32 on replica 1, float32 on replica 0"),
    ):  # fmt: skip
        value = of_replica(PAIR, part)
        with pytest.raises(ValueError, match=f"`gather` expects one .*{words}"):
            PAIR.gather(value, 0)
        with pytest.raises(ValueError, match=f"`reduce` expects one .*{words}"):
            PAIR.reduce("sum", value, 0)


# Part L, and laws


@pytest.mark.tensorflow("L46", "L47")
def test_plain_value_has_no_sum():
    """Rows of one table have none either; a mean, a zero and the sum of one replica do."""
    to, batch_to = PAIR.extended.reduce_to, PAIR.extended.batch_reduce_to
    for plain in (1.0, jnp.ones(()), jc.IndexedSlices([[1.0]], [2], (3, 1))):
        for name, call in (
            ("reduce", lambda x: PAIR.reduce("sum", {"x": x}, axis=None)),
            ("extended.reduce_to", lambda x: to("sum", x, "cpu:0")),
            (r"batch_reduce_to\[1\]", lambda x: batch_to("sum", [(Mirrored([1]), "cpu:0"), (x, "cpu:0")])),
        ):  # fmt: skip
            words = f"{name}` got the plain value .* whose SUM over 2 replicas could be"
            with pytest.raises(ValueError, match=words):
                call(plain)
        same = (PAIR.reduce("mean", [plain], axis=None)[0], ONE.reduce("sum", plain, axis=None),
                to("mean", plain, "cpu:1"))  # fmt: skip
        for value in same:
            jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (value, plain)))
    assert [x.item() for x in PAIR.extended.broadcast_to(5, Mirrored([0] * 3))] == [5, 5, 5]
    assert batch_to("sum", []) == []
    for zero in (0, 0.0, np.zeros(())):
        assert PAIR.reduce("sum", zero, axis=None) == 0
        assert to("sum", zero, "cpu:1") == 0
    assert PAIR.reduce("mean", np.array([1.0, 2.0], "f"), axis=0) == 1.5
    assert ONE.gather(np.ones(3), 0).shape == (3,), "one replica is all of it"


def test_context_tells_its_place():
    seen = []

    def look():
        context = get_replica_context()
        seen.append((context.num_replicas_in_sync, context.strategy, repr(context)))
        ids = jax.lax.map(lambda _: context.replica_id_in_sync_group, jnp.arange(2))
        return ids, jax.jit(lambda: context.replica_id_in_sync_group)()

    out = PAIR.run(look)
    assert seen == [(2, PAIR, "ReplicaContext(num_replicas_in_sync=2)")]
    assert local(PAIR, out) == [([0, 0], 0), ([1, 1], 1)]
    assert get_replica_context() is None


def test_inner_jit_keeps_its_context():
    counts = []

    @jax.jit
    def inner(x):
        context = get_replica_context()
        counts.append(context and context.num_replicas_in_sync)
        return x if context is None else context.all_reduce("sum", x)

    for s in (PAIR, STRATEGIES["mirrored-3"], PAIR):
        n = s.num_replicas_in_sync
        assert local(s, s.run(lambda x: inner(x), (1.0,))) == [n] * n
    assert inner(1.0) == 1.0
    assert set(counts) == {2, 3, None}


def test_nearest_options_win():
    ring, native = (jc.CommunicationOptions(implementation=i) for i in ("ring", "auto"))
    x = of_replica(STRATEGIES["multi"], lambda i: np.ones(16, "f"))

    def step(x):
        return all_reduce("sum", x), all_reduce("mean", x, options=native)

    for name, options, rings in (
        ("multi-ring", jc.CommunicationOptions(), True), ("multi", ring, True),
        ("multi", jc.CommunicationOptions(), False), ("multi-ring", native, False),
    ):  # fmt: skip
        s = STRATEGIES[name]
        assert [v[3][0] for v in s.run(step, (x,), options=options)] == [8, 1]
        program = replica_program(s.devices, step, s._options.merge(options), s._context)
        assert ("collective_permute" in program.jitted.lower((x,), {}).as_text()) == rings


def test_hints_are_options():
    with pytest.warns(DeprecationWarning, match="use CommunicationOptions"):
        hints = jc.CollectiveHints(bytes_per_pack=50 << 20, timeout_seconds=120)
    value = PerReplica([1.0, 3.0])
    for family in (PAIR.extended.reduce_to, jc.NcclAllReduce().reduce):
        assert family("sum", value, "cpu:0", experimental_hints=hints) == 4.0
    for family in (PAIR.extended.batch_reduce_to, jc.NcclAllReduce().batch_reduce):
        assert family("SUM", [(value, "cpu:0")], experimental_hints=hints) == [4.0]
    assert PAIR.reduce("sum", value, axis=None, experimental_hints=hints) == 4.0
    inside = functools.partial(all_reduce, "sum", experimental_hints=hints)
    assert local(PAIR, PAIR.run(inside, (value,))) == [4.0, 4.0]


def test_placed_arguments_are_not_copied():
    rows = of_replica(PAIR, lambda i: np.full((4,), i, "f"))
    copies = Mirrored([np.ones(4, "f")] * 2)
    args, _ = place_arguments("run", ((rows, copies), {}), PAIR.devices)
    assert args[0].tree is rows.tree
    assert args[1] is copies.tree
    elsewhere = Mirrored([np.ones(4, "f")] * 2, devices=jax.devices()[4:6])
    assert local(PAIR, PAIR.run(lambda x: x.sum(), (elsewhere,))) == [4.0, 4.0]


def test_ambient_mesh_is_no_hindrance():
    with jax.set_mesh(jax.make_mesh((4, 2), ("replica", "model"))):
        value = of_replica(PAIR, lambda i: np.full((2,), i, "f"))
        assert PAIR.reduce("sum", PAIR.run(lambda x: x * 2, (value,)), 0).item() == 4.0
        assert PAIR.gather(value, 0).tolist() == [0, 0, 1, 1]
        for batch in PAIR.experimental_distribute_dataset([np.arange(4.0)]):
            assert local(PAIR, batch) == [[0.0, 1.0], [2.0, 3.0]]
        assert PAIR.extended.update(value, lambda v: v + 1)[1].tolist() == [2.0, 2.0]
        options = jc.CommunicationOptions(timeout_seconds=60)
        for ops in (jc.NcclAllReduce(), jc.distribute.ReductionToOneDevice()):
            assert ops.reduce("mean", value, "cpu:7", options).tolist() == [0.5, 0.5]
            assert ops.broadcast(1.0, value)[1].item() == 1.0


def test_captured_values_are_refused():
    """Inside, it would be all replicas' values, not the replica's own."""
    for captured in (PerReplica([1.0, 2.0]), Mirrored([1.0, 1.0])):
        for use in (
            lambda x: all_reduce("sum", {"x": x}),
            lambda x: all_gather([x], 0),
            lambda x: x,
        ):
            with pytest.raises(
                ValueError, match=r"works on the value of one .* got a (Mirr|PerR).*in `args`"
            ):
                PAIR.run(lambda use=use, x=captured: use(x))
        with pytest.raises(
            RuntimeError, match="a program that maps 'replica' is being traced. Pass the value"
        ):
            PAIR.run(lambda x=captured: x[0])


# Datasets


@pytest.mark.tensorflow("H29")
@TWO
def test_dataset_shares_are_consecutive(s):
    n = s.num_replicas_in_sync
    x, y = np.arange(6.0 * n, dtype="f").reshape(2 * n, 3), np.arange(2 * n, dtype="i4")
    batches = s.experimental_distribute_dataset([(x, {"y": y, "none": None})] * 2)
    for _ in range(2):  # a list can be gone through again
        _, (share, labels) = batches
        assert share.devices == s.devices
        for i in range(n):
            assert_trees_equal(share[i], jnp.asarray(x[2 * i : 2 * i + 2]))
            assert labels["y"][i].tolist() == [2 * i, 2 * i + 1]
    (on_device,) = s.experimental_distribute_dataset(iter([jnp.arange(float(n))]))
    assert local(s, on_device) == [[float(i)] for i in range(n)]
    grads = s.run(jax.grad(lambda x: jnp.sum(x**2)), (on_device,))
    assert s.gather(grads, axis=0).tolist() == [2.0 * i for i in range(n)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("d"), P(None, "e"), P(("d", "e")), P()])
def test_sharded_batch_is_split(kind, spec):
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(kind, kind))
    x = jax.device_put(np.arange(16.0).reshape(8, 2), NamedSharding(mesh, spec))
    for s in (PAIR, STRATEGIES["mirrored-3"]):
        (batch,) = s.experimental_distribute_dataset([x])
        np.testing.assert_array_equal(s.gather(batch, 0), x)
    on_one = PAIR.extended.broadcast_to(x, "cpu:3")
    np.testing.assert_array_equal(on_one[:3], np.asarray(x)[:3])


def test_uneven_rows_have_shares():
    x, s = np.arange(8.0, dtype="f").reshape(4, 2), STRATEGIES["mirrored-3"]
    (batch,) = s.experimental_distribute_dataset([{"x": x}])
    shares = "{0: float32[2, 2], 1: float32[1, 2], 2: float32[1, 2]}"
    assert repr(batch["x"]) == f"Uneven({shares} of 3)"
    assert s.gather(batch, 0)["x"].tolist() == x.tolist()
    assert s.reduce("mean", batch, 0)["x"].tolist() == x.mean(0).tolist()
    for call in (s.extended.reduce_to, jc.NcclAllReduce().reduce):
        with pytest.raises(ValueError, match="`reduce` got parts of unequal shapes"):
            call("sum", batch["x"], "cpu:0")
    for bad, message in (
        ([3.0], "batch 0 is a scalar and has no rows"),
        ([np.array(["a", "b"])], "batch 0 holds no numbers: it is an array of <U1"),
        (3, "expects an iterable of batches, pytrees of arrays; got int"),
    ):
        with pytest.raises(ValueError, match=message):
            list(PAIR.experimental_distribute_dataset(bad))


def test_forgotten_functions_free_memory():
    class Model:
        def __init__(self):
            self.weights = jnp.ones(3)

        def step(self, x):
            return x * self.weights

    kept = []
    for _ in range(3):
        model = Model()
        with CompileCounter() as compiled:
            assert PAIR.run(model.step, (2.0,))[1].tolist() == [2.0] * 3
            PAIR.run(model.step, (3.0,))
            PAIR.run(lambda x, w=model.weights: x + w, (2.0,))
        assert compiled.count <= 2, "a bound method is compiled once"
        kept.append(weakref.ref(model.weights))
        del model
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


# Bad input


def test_inner_calls_name_another():
    for message, call in (
        (r"`\w+.run` .* Inside, call the function itself", lambda s, x: s.run(lambda: 1)),
        (r"`\w+.reduce` .*get_replica_context\(\).all_reduce", lambda s, x: s.reduce("sum", x, None)),
        (r"`\w+.gather` .*get_replica_context\(\).all_gather", lambda s, x: s.gather(x, 0)),
        (r"`\w+.scope` .* this strategy is in scope already", lambda s, x: s.scope().__enter__()),
        (r"experimental_distribute_values_from_function` .* own value", lambda s, x: of_replica(s, float)),
        (r"experimental_distribute_dataset` .* its share already", lambda s, x: s.experimental_distribute_dataset([x])),
        (r"extended.reduce_to` .*\.all_reduce", lambda s, x: s.extended.reduce_to("sum", x, "cpu:0")),
        (r"extended.batch_reduce_to` .*\.all_reduce", lambda s, x: s.extended.batch_reduce_to("sum", [])),
        (r"extended.broadcast_to` .* may use the value", lambda s, x: s.extended.broadcast_to(x, "cpu:0")),
        (r"extended.update` .* return it", lambda s, x: s.extended.update(x, lambda v: v)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            PAIR.run(lambda x, call=call: call(PAIR, x), (1.0,))


def test_ops_refuse_traced_values():
    """Inside, a value is one replica's, so that there is nothing to reduce, gather or copy."""
    ops = jc.NcclAllReduce()
    for call in (
        lambda x: ops.reduce("sum", x, "cpu:0"),
        lambda x: ops.batch_reduce("sum", [(1.0, "cpu:0"), (x, "cpu:0")]),
        lambda x: ops.broadcast(x, "cpu:0"),
    ):
        for x in (np.ones(2), PerReplica([np.ones(2)] * 2)):
            with pytest.raises(
                RuntimeError, match="inside a function that `strategy.run` runs on ev"
            ):
                PAIR.run(lambda x=x, call=call: call(x))
        for trace in (jax.jit, lambda f: jax.vmap(f, axis_name="data")):
            with pytest.raises(ValueError, match="is being traced, so it lies on no device"):
                trace(call)(np.ones((2, 2)))
    with pytest.raises(ValueError, match="is being traced, .*inside one, `jc.all_reduce`"):
        jax.jit(lambda x: ops.reduce("sum", 1.0, x))(PerReplica([1.0, 2.0]))


def test_escaped_context_is_refused():
    kept = []
    PAIR.run(lambda: kept.append(get_replica_context()))
    (context,) = kept
    for use in (
        lambda: context.replica_id_in_sync_group,
        lambda: context.all_reduce("sum", 1.0),
        lambda: context.all_gather(np.ones(1), 0),
        lambda: STRATEGIES["mirrored-3"].run(lambda: context.all_reduce("sum", 1.0)),
    ):
        with pytest.raises(RuntimeError, match="outside the function that `strategy.run` called"):
            use()


def test_run_arguments_are_checked():
    odd, uneven = (
        type("Odd", (), {"__call__": abs, "__hash__": None})(),
        of_replica(PAIR, lambda i: np.ones(i + 1)),
    )
    for message, call, *args in (
        ("expects a function, and its arguments in a tuple.*got int", PAIR.run, 3),
        ("got builtin_function_or_method and args PerReplica", PAIR.run, abs, PerReplica([1, 2])),
        (r"args\[0\]\['a'\]\[1\] is 'x' \(str\).*functools.partial", PAIR.run, abs, ({"a": (1, "x")},)),
        (r"kwargs\['y'\] is .* \(object\); expected a PerReplica", PAIR.run, abs, (), {"y": object()}),
        ("is a PerReplica over cpu:0, cpu:1, cpu:2; the replicas are on", PAIR.run, abs, (PerReplica([1, 2, 3]),)),
        (r"args\[0\] has parts of unequal shapes.*Pad them", PAIR.run, abs, (uneven,)),
        (r"args\[0\] is being traced, so it lies on no device", jax.jit(lambda x: PAIR.run(abs, (x,))), 1.0),
        ("`options` must be a CommunicationOptions", PAIR.run, abs, (), {}, "ring"),
        ("`MirroredStrategy.extended.update` expects a function", PAIR.extended.update, PerReplica([1, 2]), None),
        ("got builtin_function_or_method and args int", PAIR.extended.update, PerReplica([1, 2]), abs, 1),
        ("cannot be a key", PAIR.run, odd),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(*args)


MATRIX = of_replica(PAIR, lambda i: np.ones((2, 3), "f"))
SLICES = PerReplica([jc.IndexedSlices([[1.0]], [0], (3, 1))] * 2)


@pytest.mark.tensorflow("G16")
def test_reduce_and_gather_are_checked():
    flags = PerReplica([np.array([True])] * 2)
    reduce, gather = functools.partial(PAIR.reduce, "sum"), PAIR.gather
    for error, message, call, *args in (
        *((ValueError, r"`reduce`: the value has shape \(2, 3\) and so no axis", reduce, MATRIX, k) for k in (2, -3, (0, 2))),
        *((ValueError, r"`reduce`: the value .* no axis", PAIR.reduce, "mean", x, k) for x, k in ((1.0, 0), (np.ones(2), 1))),
        (ValueError, "expected different axes", reduce, MATRIX, (0, -2)),
        (ValueError, "at least one", reduce, MATRIX, ()),
        (ValueError, "an integer", reduce, MATRIX, "x"),
        (ValueError, r"leaf \[1\] is a scalar, which has no axis 0", reduce, PerReplica([(np.ones(2), 1.0)] * 2), 0),
        *((ValueError, where, reduce, {"a": MATRIX, "b": x}, k) for k in (None, 0)
          for where, x in ((r"`reduce\['b'\]` expects a PerReplica.* got 'x'", "x"), (r"leaf \['b'\]: booleans have", flags))),
        (ValueError, "`reduce_op` must be a ReduceOp", PAIR.reduce, "max", MATRIX, None),
        (TypeError, "axis", reduce, MATRIX),
        (ValueError, "booleans have no sum", reduce, flags, 0),
        (ValueError, "`MirroredStrategy.gather` got the plain value .* belongs to no replica", gather, [np.ones(1)] * 2, 0),
        (ValueError, "the value is a scalar, which has no axis 0", gather, PerReplica([1.0, 2.0]), 0),
        (NotImplementedError, "`gather` expects dense arrays", gather, SLICES, 0),
        (NotImplementedError, "`all_gather` expects dense arrays", PAIR.run, lambda part: all_gather(part, 0), (SLICES,)),
        (ValueError, "`reduce` along an axis expects dense arrays", reduce, SLICES, 0),
        (ValueError, r"update` expects a Mirrored or a PerReplica.* got 3", PAIR.extended.update, 3, lambda v: v),
        (ValueError, "one structure for all replicas; replica 1 has", of_replica, PAIR, lambda i: [1.0] * (i + 1)),
        (ValueError, "must be an array or a number; got 'x'", of_replica, PAIR, lambda i: "x"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(*args)


@pytest.mark.tensorflow("H38")
def test_bad_strategy_arguments_are_refused():
    one, several = jc.MirroredStrategy, jc.MultiWorkerMirroredStrategy
    for message, kind, arguments in (
        ("`MirroredStrategy` got no devices", one, {"devices": []}),
        ("got a device twice: cpu:0", one, {"devices": ["cpu:0"] * 2}),
        ("got 'cpu:9', but there is no such device", one, {"devices": ["cpu:9"]}),
        (r"expects devices, as in `jax.devices\(\)`; got 3", one, {"devices": [3]}),
        ("must be a list or tuple of devices or device strings, or None; got 'cpu:0'", one, {"devices": "cpu:0"}),
        ("`cross_device_ops` must be a CrossDeviceOps, .*'nccl'", one, {"cross_device_ops": "nccl"}),
        ("`cluster_resolver` must be a ClusterResolver, such", several, {"cluster_resolver": object()}),
        ("`communication_options` must be a CommunicationOptions or None", several, {"communication_options": "ring"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kind(**arguments)


@pytest.mark.tensorflow("H37")
def test_strategy_shows_and_copies():
    ops = jc.distribute.CollectiveAllReduce(devices(2), 2)
    for immutable in (PAIR, ops, jc.distribute.ReductionToOneDevice("cpu:1")):
        assert copy.deepcopy({"s": immutable})["s"] is immutable
    assert repr(PAIR) == "MirroredStrategy(devices=[cpu:0, cpu:1])"
    assert repr(STRATEGIES["multi"]).startswith("MultiWorkerMirroredStrategy(devices=[cpu:0")


def test_shared_names_are_one_object():
    names = {name for name in vars(jc.distribute) if not name.startswith("_")} & set(dir(jc))
    assert all(getattr(jc.distribute, name) is getattr(jc, name) for name in names)
