"""Rows of parts F and G of facts/tensorflow_cases.md: collectives inside a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, mesh_of, run
from jax.sharding import Mesh

import jaxcoll as jc

P = jax.sharding.PartitionSpec
OPTIONS = {
    "auto": jc.CommunicationOptions(),
    "ring": jc.CommunicationOptions(implementation="RING"),
    "nccl": jc.CommunicationOptions(implementation="nccl"),
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def reduce(op, value, options=None):
    return jc.all_reduce(op, value, "data", options=options)


@EVERY
@pytest.mark.parametrize("n", [1, 2, 4])
def test_F16_F17_F19_all_reduce_dense_sparse_and_tuples(options, n):
    def f(x):
        sparse = jc.IndexedSlices(jnp.ones((1, 1)) * x, jnp.array([0]), (5, 1))
        three = jc.IndexedSlices(jnp.full((1, 1), 3.0) * x, jnp.array([2]), (5, 1))
        return [
            (reduce(op, x, options), reduce(op, (x, 2 * x), options),
             [s.to_dense() for s in reduce(op, (sparse, three), options)])
            for op in ("sum", "mean")
        ]  # fmt: skip

    for result, k in zip(run("checked", f, n, jnp.ones(n)), (n, 1), strict=True):
        one, pair, (first, second) = jax.tree.map(lambda a: a[0], result)
        assert isinstance(pair, tuple)
        assert (one, *pair) == (k, k, 2 * k)
        assert first.ravel().tolist() == [k, 0, 0, 0, 0]
        assert second.ravel().tolist() == [0, 0, 3 * k, 0, 0]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("options", [OPTIONS["auto"], OPTIONS["ring"]], ids=["auto", "ring"])
def test_F22_a_reduction_in_both_branches_of_a_cond(runner, options):
    def f(x):
        same = jax.lax.axis_size("data") > 2  # known to all, so that all take one branch
        take = lambda v: reduce("sum", v, options)
        return jax.lax.cond(same, take, lambda v: take(v) * 2, x)

    assert run(runner, f, 4, jnp.ones((4, 1)))[0].tolist() == [4.0]


@EVERY
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float16", 1e-3)])
def test_G1_G2_G5_G8_G32_the_mean_of_two(options, dtype, rtol):
    x = (np.array([[0.1], [0.3]]) + np.arange(8)).astype(dtype)
    got = run("checked", lambda v: reduce("mean", v, options), 2, jnp.asarray(x))[0]
    np.testing.assert_allclose(got, 0.2 + np.arange(8), rtol=rtol)
    scalars = jnp.array([0.1, 0.3], dtype)
    got = run("pmap", lambda v: reduce("mean", v, options), 2, scalars)[1]
    np.testing.assert_allclose(got, 0.2, rtol=rtol)


def test_G7_a_reduction_in_a_loop():
    def f(x):
        def body(state):
            i, total = state
            return i + 5, total + reduce("sum", jnp.where(i < 5, 10.0, 5.0) + 0 * x)

        return jax.lax.while_loop(lambda s: s[0] < 10, body, (0, jnp.float32(0)))[1]

    assert run("checked", f, 2, jnp.zeros(2))[0] == 30.0


def test_G19_groups_of_one_and_two():
    assert run("checked", lambda v: reduce("sum", v), 1, jnp.ones((1, 1)))[0].tolist() == [1.0]
    assert run("checked", lambda v: reduce("sum", v), 2, jnp.ones((2, 1))).tolist() == [[2.0]] * 2


def grid(f, shape, names, x, axis):
    n = shape[0] * shape[1]
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(shape), names)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(names), out_specs=P(axis)))(x)


@EVERY
def test_G23_G28_groups_are_axes(options):
    inner = lambda v: jc.all_reduce("sum", v, "inner", options=options)
    outer = lambda v: jc.all_reduce("sum", v, "outer", options=options)
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert grid(inner, (2, 2), ("outer", "inner"), x, "outer").tolist() == [3.0, 7.0]
    assert grid(outer, (2, 2), ("outer", "inner"), x, "inner").tolist() == [4.0, 6.0]
    alone = grid(inner, (2, 1), ("outer", "inner"), jnp.ones(2), "outer")
    together = grid(outer, (2, 1), ("outer", "inner"), jnp.ones(2), "inner")
    assert (alone.tolist(), together.tolist()) == ([1.0, 1.0], [2.0])


def test_G26_groups_of_two_then_of_three():
    for n, key, want in ((2, 1.0, 2.0), (3, 2.0, 6.0)):
        got = run("checked", lambda v: reduce("sum", v), n, jnp.full((n, 4), key))
        assert got[0].tolist() == [want] * 4


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_G49_the_gradient_is_the_reduction_of_the_gradients(op):
    """c is 1 and 3 on two replicas, as in rows H13 and H14."""
    c = jnp.array([1.0, 3.0])
    f = lambda x, c: jax.grad(lambda x: reduce(op, x) * c)(x)
    for runner in ("pmap", "unchecked"):
        assert run(runner, f, 2, jnp.full(2, 42.0), c).tolist() == [4.0 if op == "sum" else 2.0] * 2
    body = lambda x, c: f(x[0], c[0])[None]
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(mapped)(jnp.full(2, 42.0), c).tolist() == [4.0 if op == "sum" else 2.0] * 2
