"""Types of a byte and less: moved to the bit, summed where a sum can be held, refused elsewhere."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import RUNNERS, run

import jaxcoll as jc

N = 4
FLOATS = [
    name
    for name in sorted(dir(ml_dtypes))
    if name.startswith(("float4", "float8")) and hasattr(jnp, name)
]
INTS = ["int2", "uint2", "int4", "uint4"]
RING = jc.CommunicationOptions(algorithm="ring")


def everything(name):
    """Every value of a type, in another order on each replica."""
    dtype = np.dtype(getattr(jnp, name))
    if name in INTS:
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
        "ring": jc.all_gather(x, "data", options=RING),
        "broadcast": jc.broadcast(x, "data", source=2),
        "digests": jc.check_replicas(x, "data").digests,
    }
    return found if rows is None else {**found, "rows": jc.all_reduce("sum", rows, "data").values}


@pytest.mark.usefixtures("optimized")  # XLA's older code rounds the smallest numbers of some types
@pytest.mark.parametrize(
    ("names", "runner"),
    [*((["float8_e8m0fnu", "int2"], r) for r in RUNNERS[:2]), (INTS, "checked"), (FLOATS, "checked")],
)  # fmt: skip
def test_what_only_moves_arrives_as_it_was(names, runner):
    given = {name: everything(name) for name in names}
    f = lambda tree: {name: moved(x) for name, x in tree.items()}
    found = run(runner, f, N, given)
    for name, x in given.items():
        got = jax.tree.map(lambda v: v[0], found[name])
        for kind in ("gather", "ring"):
            # Of a float4 XLA's CPU compiler loses the sign of a zero in copies of its own.
            same(got[kind], x.reshape(-1), signs=not name.startswith("float4"))
        same(got["broadcast"], x[2], signs=False)
        if "rows" in got:
            same(got["rows"][:, 0], x.reshape(-1), signs=False)
        assert len({bytes(d) for d in got["digests"]}) == N, "each replica's is another"


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_is_reduced_is_the_sum_of_its_values(op):
    given = {}
    for name in (*FLOATS, "int4", "uint4"):
        x = np.ones((N, 7), np.float32)
        x[:, 3] = [0.5, 0.5, 1, 2] if name in FLOATS else [0, 1, 2, 1]
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


@pytest.mark.parametrize("options", [None, RING])
def test_an_empty_array_that_all_replicas_hold_is_no_sum_to_count_again(options):
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
