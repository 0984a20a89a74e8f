"""The cotangent of all_reduce is the all_reduce of the cotangents, with the same op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPTIONS, RUNNERS, noise, per_replica, rows

import jaxcoll as jc

# Each kind of options, and each runner with the compiler's algorithm and with one of ours.
CASES = [("checked", o) for o in OPTIONS]
CASES += [(r, o) for r in RUNNERS if r != "checked" for o in ("auto", "ring")]


@pytest.mark.parametrize(("runner", "name"), CASES)
def test_H13_H14_each_replica_differentiates_its_own_use(runner, name):
    """Replicas hold x = 42 and y = all_reduce(x) * c with c = 1 and 3."""

    def f(x, c):
        reduce = lambda v, op: jc.all_reduce(op, v, "data", options=OPTIONS[name])
        return [jax.grad(lambda v, op=op: reduce(v, op) * c)(x) for op in ("sum", "mean")]

    total, mean = per_replica(runner, f, 2, np.full(2, 42.0, "f"), np.array([1.0, 3.0], "f"))
    np.testing.assert_array_equal(total, [4.0, 4.0])
    np.testing.assert_array_equal(mean, [2.0, 2.0])


@pytest.mark.parametrize(
    ("runner", "name", "n"),
    [
        *((runner, name, 5 if runner == "checked" else 3) for runner, name in CASES),
        *((runner, "auto", 1) for runner in RUNNERS),
    ],
)
def test_the_vector_jacobian_product_is_the_same_reduction(runner, name, n):
    tangents = {"a": noise(n, 5), "b": (noise(n), noise(n, 2, 3))}

    def f(x, ct):
        reduce = lambda v: jc.all_reduce("sum", v, "data", options=OPTIONS[name])
        dot = lambda v: sum(map(jnp.vdot, jax.tree.leaves(reduce(v)), jax.tree.leaves(ct)))
        return jax.grad(dot)(x)

    got = per_replica(runner, f, n, jax.tree.map(jnp.ones_like, tangents), tangents)
    for g, ct in zip(jax.tree.leaves(got), jax.tree.leaves(tangents), strict=True):
        want = np.broadcast_to(np.asarray(ct, np.float64).sum(0), ct.shape)
        np.testing.assert_allclose(g, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("runner", "name"), CASES)
def test_forward_mode_reduces_the_tangent(runner, name):
    def f(x, t):
        return jax.jvp(
            lambda v: jc.all_reduce("mean", v, "data", options=OPTIONS[name]), (x,), (t,)
        )[1]

    if runner == "checked":
        # Invariant: `per_replica` wants something that varies.
        inner = f
        f = lambda x, t: inner(x, t) + 0 * x
    t = rows(4, 3)
    got = per_replica(runner, f, 4, rows(4, 3), t)
    np.testing.assert_allclose(got[0], np.asarray(t).mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("runner", "name"), [("pmap", "auto"), *(("checked", name) for name in OPTIONS)]
)
def test_second_derivatives(runner, name):
    """f(x) = (sum of x over replicas)^3 / 3 has the second derivative 2·s everywhere, times n."""

    def f(x):
        s = lambda v: jc.all_reduce("sum", v, "data", options=OPTIONS[name]) ** 3 / 3
        return jax.grad(lambda v: jax.grad(lambda u: s(u) + 0 * u)(v))(x)

    x = jnp.array([1.0, 2.0])
    got = per_replica(runner, f, 2, x)
    # d/dx_i of Σ_j (s²)_j = n·s²; once more, over both replicas' outputs: n·n·2s.
    np.testing.assert_allclose(got, [2 * 2 * 2 * 3.0] * 2, rtol=1e-6)
