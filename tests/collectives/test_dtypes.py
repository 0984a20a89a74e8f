"""Types that each dtype is summed in and comes back as, and those that are refused.

Types of a byte and less are moved to the bit, and summed where a sum can be held.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from cases import (
    OPTIONS,
    RUNNERS,
    assert_trees_equal,
    gaussian,
    lowered,
    mapped,
    rows,
    run,
    vmapped,
)

import jaxcoll as jc

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32]
INTS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


def check_both(x):
    """jaxcoll's results and lax's own on the same values are the same."""

    def f(v):
        ours = [jc.all_reduce(op, v, "data") for op in ("sum", "mean")]
        return ours, [jax.lax.psum(v, "data"), jax.lax.pmean(v, "data")]

    assert_trees_equal(*vmapped(f, x))


def test_dtypes_are_those_of_lax():
    check_both([np.abs(rows(4, 6)).astype(dtype) for dtype in (*FLOATS, *INTS, np.complex64)])
    dtypes = (np.float64, np.int64, np.int32, np.complex128)
    with jax.enable_x64(True):
        check_both([np.arange(12).reshape(4, 3).astype(dtype) for dtype in dtypes])


def test_float16_mean_travels_narrow():
    x, mean = gaussian(8, 1000).astype(np.float16), lambda v: jc.all_reduce("mean", v, "data")
    assert "(tensor<1000xf16>) -> tensor<1000xf16>" in lowered(mean, 8, x).as_text()
    exact = x.astype("f8")
    bound = 8 * 2.0**-11 * np.abs(exact).mean(0) + 2.0**-25 * 8
    assert np.all(np.abs(run("vmap", mean, 8, x)[0].astype("f8") - exact.mean(0)) <= bound)


def test_numbers_are_arrays():
    value = lambda x: {"x": x, "one": 1.0, "np": np.ones(2, "f")}
    got = run("vmap", lambda x: jc.all_reduce("sum", value(x), "data"), 4, rows(4, 2))
    assert got["one"][0] == 4
    np.testing.assert_array_equal(got["np"][0], [4, 4])


def test_bfloat16_survives_partial_mapping():
    """XLA's CPU compiler would abort the process: it must travel as float32 there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = mapped(lambda v: jc.all_reduce("sum", v, "data"), mesh=mesh, axis_names={"data"})
    x = jnp.ones((4, 6), jnp.bfloat16)
    assert "}) : (tensor<1x6xf32>) -> tensor<1x6xf32>" in f.lower(x).as_text()
    np.testing.assert_array_equal(np.asarray(f(x), "f"), 4)


@pytest.mark.parametrize("name", ["auto", "halving_doubling", "ring-in-2"])
def test_sharded_leaf_keeps_its_shape(name):
    """With an Explicit second axis, flattening would gather it, and so would cutting shards."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    options = OPTIONS[name].replace(bytes_per_pack=1 << 20)
    reduce = lambda t: jc.all_reduce("sum", t, "data", options=options)
    put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
    value = {
        "split": put(rows(4, 6), "data", "model"),
        "whole": put(rows(4, 3), "data"),
        "other": put(rows(4, 5), "data"),
    }
    with jax.set_mesh(mesh):
        out = mapped(reduce, mesh=mesh, axis_names={"data"})(value)
    np.testing.assert_array_equal(out["split"][0], rows(4, 6).sum(0))
    np.testing.assert_array_equal(out["other"][0], rows(4, 5).sum(0))
    assert out["split"].sharding.spec[1] == "model"


# Types of a byte and less

N = 4
NARROW = [
    name
    for name in sorted(dir(ml_dtypes))
    if name.startswith(("float4", "float8")) and hasattr(jnp, name)
]
TINY = ["int2", "uint2", "int4", "uint4"]


def everything(name):
    """Every value of a type, in another order on each replica."""
    dtype = np.dtype(getattr(jnp, name))
    if name in TINY:
        info = ml_dtypes.iinfo(dtype)
        values = np.arange(int(info.min), int(info.max) + 1).astype(dtype)
    else:
        values = np.arange(2 ** ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype)
    return np.stack([np.roll(values, 3 * i) for i in range(N)])


def same(got, want, *, signs=True):
    """The same values, NaN where it was; without `signs` a negative zero may be a zero."""
    assert got.dtype == want.dtype
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    np.testing.assert_array_equal(got, want)
    if signs:
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


def moved(x):
    """Everything that moves and does not add, in one program."""
    rows = jc.IndexedSlices(x[:, None], jnp.arange(len(x)), (len(x), 1))
    if x.dtype.name in ("int2", "uint2"):
        rows = None  # it has no sum, so a reduction refuses its rows
    found = {
        "gather": jc.all_gather(x, "data"),
        "broadcast": jc.broadcast(x, "data", source=2),
        "digests": jc.check_replicas(x, "data").digests,
    }
    return found if rows is None else {**found, "rows": jc.all_reduce("sum", rows, "data").values}


@pytest.mark.usefixtures("optimized")  # XLA's older code rounds the smallest numbers of some types
@pytest.mark.parametrize(
    ("names", "runner"),
    [*((["float8_e8m0fnu", "int2"], r) for r in RUNNERS[:2]), (TINY, "checked"), (NARROW, "checked")],
)  # fmt: skip
def test_moved_values_keep_their_bits(names, runner):
    given = {name: everything(name) for name in names}
    f = lambda tree: {name: moved(x) for name, x in tree.items()}
    found = run(runner, f, N, given)
    for name, x in given.items():
        got = jax.tree.map(lambda v: v[0], found[name])
        # Of a float4 XLA's CPU compiler loses the sign of a zero in copies of its own.
        same(got["gather"], x.reshape(-1), signs=not name.startswith("float4"))
        same(got["broadcast"], x[2], signs=False)
        if "rows" in got:
            same(got["rows"][:, 0], x.reshape(-1), signs=False)
        assert len({bytes(d) for d in got["digests"]}) == N, "each replica's is another"


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_narrow_sums_are_right(op):
    given = {}
    for name in (*NARROW, "int4", "uint4"):
        x = np.ones((N, 7), np.float32)
        x[:, 3] = [0.5, 0.5, 1, 2] if name in NARROW else [0, 1, 2, 1]
        if op == "mean" and name in NARROW:  # a sum of four does not fit
            x[:, 4] = min(float(ml_dtypes.finfo(name).max), 2.0**15)
        given[name] = x.astype(np.dtype(getattr(jnp, name)))

    def both(v):
        shards = jc.reduce_scatter(op, {"a": v, "b": v[:5]}, "data")
        return jc.all_reduce(op, v, "data"), jc.all_gather(shards, "data")["a"]

    found = run("checked", lambda tree: {name: both(v) for name, v in tree.items()}, N, given)
    for name, x in given.items():
        values = x.astype(np.float32)
        want = values.sum(0) if op == "sum" else values.mean(0)
        for each in found[name]:
            same(each[0], want.astype(each.dtype), signs=False)


@pytest.mark.parametrize("options", [None, jc.CommunicationOptions(algorithm="ring")])
def test_empty_invariant_arrays_are_taken(options):
    """Nothing is counted twice where there is nothing."""
    empty = {"bias": jnp.zeros((0, 3)), "none": None}

    def f(x):
        tree = {**empty, "x": x}
        reduced = jc.all_reduce("sum", tree, "data", options=options)
        return reduced, jc.all_gather(jc.reduce_scatter("mean", tree, "data"), "data")

    reduced, scattered = run("checked", f, N, jnp.ones((N, 2)))
    for got in (reduced, scattered):
        assert got["bias"].shape == (N, 0, 3)
    assert reduced["x"][0].tolist() == [N, N]


# Weighted means: counts neither overflow nor are rounded to eight bits

WEIGHTS = ["int32", "int16", "uint8", "float16", "bfloat16"]
COUNTS = {"uint8": 200, "int16": 30_000}


def tokens(dtype, weight):
    """The loss of many tokens whose mean is 1.5 w on each replica: its sum just fits a float16."""

    def loss(w, x):
        count = COUNTS.get(weight, 40_000) * len(x) // 2
        total = w * jnp.sum(x).astype(dtype) * jnp.float32(count * 0.75 / len(x)).astype(dtype)
        return jc.WeightedLoss(total.sum(), jnp.float32(count).astype(weight))

    return loss


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weighted_means_do_not_overflow(dtype):
    w = jnp.asarray([0.875], dtype)

    def f(x):
        found = []
        for loss in (tokens(dtype, kind) for kind in WEIGHTS):
            value, shards = jc.value_and_grad(loss, "data", scatter=True)(w, x)
            found.append((value, jc.all_gather(shards, "data")))
            found.append(jc.value_and_grad(loss, "data")(w, x))
            found.append(jc.accumulate(loss, "data", 2)(w, x))
        return found

    tolerance = {"rtol": 2.0**-7 if dtype == "bfloat16" else 2.0**-9}
    for value, grad in run("checked", f, N, jnp.full((N, 2), 2.0)):
        assert value.dtype == grad.dtype == dtype
        np.testing.assert_allclose(value.astype("f")[0], 1.5 * 0.875, **tolerance)
        np.testing.assert_allclose(grad.astype("f")[0], [1.5], **tolerance)


def test_counts_are_not_rounded():
    """Of 257 tokens on each replica; as bfloat16 their count would be 256, or 1032 of all 1028."""
    f = jc.grad(lambda w, x: jc.WeightedLoss(w * 256, 257), "data")
    grad = run("checked", lambda x: f(jnp.bfloat16(1), x), N, jnp.ones(N))
    assert grad[0] == jnp.bfloat16(256 / 257) < 1


def test_clipping_survives_an_infinite_norm():
    """Its norm is 4e6, and a float16 ends at 65504."""
    optimizer = jc.sharded_optimizer(optax.sgd(1.0), "data", max_norm=1.0)
    params = {"w": jnp.zeros(4096, jnp.float16)}

    def step(x):
        grads = {"w": jnp.full(4096, 60_000, jnp.float16) * x.astype(jnp.float16)}
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return updates["w"]

    got = run("checked", step, N, jnp.ones(N))[0]
    np.testing.assert_allclose(got.astype("f"), -1 / 64, rtol=1e-3)


@pytest.mark.parametrize("runner", ["checked", "vmap"])
def test_mixed_metrics_have_wider_type(runner):
    with jax.enable_x64(True):
        pairs = [("float64", "float32"), ("float32", "float64"), ("complex64", "float64")]
        f = lambda x: [
            jc.reduce_metrics(jc.WeightedMean(x.astype(a), x.astype(b)), "data") for a, b in pairs
        ]
        found = run(runner, f, N, jnp.arange(1.0, N + 1, dtype="float32"))
    assert [v.dtype for v in found] == ["float64", "float64", "complex128"]
    assert [np.asarray(v)[0] for v in found] == [1, 1, 1]


def test_complex_constants_are_summed():
    """XLA's CPU compiler aborts on it, and with it the process."""
    zeros = lambda: jnp.zeros((8, 3), jnp.complex64)
    params = {"used": np.complex64(1 + 1j), "unused": np.ones((8, 3), np.complex64)}
    loss = lambda p, x: jnp.mean(x * jnp.abs(p["used"]))
    packed, coded = (
        jc.CommunicationOptions(**o) for o in ({"bytes_per_pack": 8}, {"compression": "int8"})
    )
    calls = [
        lambda x: jc.psum(zeros(), "data"),
        lambda x: jc.all_gather(jc.reduce_scatter("sum", zeros(), "data"), "data"),
        lambda x: jc.broadcast(zeros(), "data"),
        *(
            lambda x, o=o: jc.grad(loss, "data", options=o)(params, x)["unused"]
            for o in (None, packed, coded)
        ),
        lambda x: jc.all_gather(jc.grad(loss, "data", scatter=True)(params, x), "data")["unused"],
    ]
    for f in calls:
        assert not np.any(jax.pmap(f, axis_name="data")(np.arange(8.0, dtype="f")))
