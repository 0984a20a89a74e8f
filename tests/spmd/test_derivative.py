"""The cotangent of all_reduce is the all_reduce of the cotangents, with the same op."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPTIONS, RUNNERS, per_replica, rows

import jaxcoll as jc

# Each kind of options, and each runner with the compiler's algorithm and with one of ours.
CASES = [("vmap", 3, ("auto",)), ("vmap", 3, ("ring",)), ("checked", 5, tuple(OPTIONS))]
CASES += [(runner, 3, ("auto", "ring")) for runner in ("pmap", "unchecked")]
CASES += [(runner, 1, ("auto",)) for runner in RUNNERS]
EVERY = pytest.mark.parametrize(("runner", "n", "names"), CASES)


def vectors(n):
    """Small integers, whose sums are exact."""
    return {"a": rows(n, 5, seed=1), "b": (rows(n, seed=1), rows(n, 2, 3))}


@functools.cache
def found(runner, n, names):
    """Every derivative of each kind of reduction, in one program."""

    def derivatives(x, ct, options):
        reduce = lambda v, op: jc.all_reduce(op, v, "data", options=options)

        def back(op):
            dot = lambda v: sum(map(jnp.vdot, jax.tree.leaves(reduce(v, op)), jax.tree.leaves(ct)))
            return jax.grad(dot)(x)

        tangent = jax.jvp(lambda v: reduce(v, "mean"), (x,), (ct,))[1]
        cube = lambda v: reduce(v, "sum") ** 3 / 3 + 0 * v
        return {
            "sum": back("sum"),
            "mean": back("mean"),
            # Invariant: `per_replica` wants something that varies.
            "tangent": jax.tree.map(lambda t, x: t + 0 * x, tangent, x),
            "second": jax.grad(lambda v: jax.grad(cube)(v) + 0 * v)(x["b"][0]),
        }

    f = lambda x, ct: [derivatives(x, ct, OPTIONS[name]) for name in names]
    return per_replica(runner, f, n, jax.tree.map(np.ones_like, vectors(n)), vectors(n))


def is_the_reduction(got, op, n):
    for g, v in zip(jax.tree.leaves(got), jax.tree.leaves(vectors(n)), strict=True):
        total = np.asarray(v).sum(0) / np.float32(n if op == "mean" else 1)
        np.testing.assert_allclose(
            g, np.broadcast_to(total, v.shape), rtol=1e-6 if op == "mean" else 0
        )


@EVERY
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_G49_H13_H14_the_vector_jacobian_product_is_the_same_reduction(runner, n, names, op):
    """Each replica has cotangents of its own."""
    for each in found(runner, n, names):
        is_the_reduction(each[op], op, n)


@EVERY
def test_forward_mode_reduces_the_tangent(runner, n, names):
    for each in found(runner, n, names):
        is_the_reduction(each["tangent"], "mean", n)


@EVERY
def test_second_derivatives(runner, n, names):
    """d/dx_i of Σ_j s³/3 is n·s², s the sum of n ones; once more over all replicas: n·n·2s."""
    for each in found(runner, n, names):
        np.testing.assert_allclose(each["second"], [2.0 * n**3] * n, rtol=1e-6)
