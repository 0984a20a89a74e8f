"""What JAX's types refuse for want of a mark runs as `pmap` would run it, whatever JAX's words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxcoll as jc

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 5)).astype("f")
W = RNG.standard_normal(5).astype("f")


def plain(w, x):
    """Of one replica's share."""
    return jnp.mean((x @ w) ** 2)


@jax.custom_vjp
def derived(w, x):
    return plain(w, x)


derived.defvjp(
    lambda w, x: (plain(w, x), (w, x)),
    lambda kept, ct: (ct * jax.grad(plain)(*kept), jnp.zeros_like(kept[1])),
)


@jax.custom_jvp
def constant(x):
    return 0.0 * jnp.sum(x)


constant.defjvp(lambda primals, tangents: (constant(*primals), jnp.zeros(())))


def solved(w, x):
    """A solver whose matrix varies, and whose right-hand side does not."""
    matrix = 1 + plain(lax.stop_gradient(w), x)
    solve = lambda _, b: b / matrix
    one = lax.custom_linear_solve(lambda z: matrix * z, jnp.float32(1), solve, solve)
    return plain(w, x) * one * lax.stop_gradient(matrix)


def conjugate_gradient(w, x):
    hessian = lax.stop_gradient(x.T @ x / x.shape[0]) + jnp.eye(5)
    found, _ = jax.scipy.sparse.linalg.cg(lambda v: hessian @ v, w, maxiter=4)
    return jnp.mean((x @ found) ** 2)


def reduced(w, x):
    """By an operation of the user's own, with a constant in it."""
    biggest = lambda a, b: jnp.maximum(a, b * jnp.float32(1))
    largest = lax.reduce(lax.stop_gradient(x[:, 0]), jnp.float32(0), biggest, (0,))
    return plain(w, x) + largest


def sampled(w, x):
    """By a sampler that wants the key to vary as its argument does."""
    noise = jax.random.gamma(jax.random.key(0), lax.stop_gradient(jnp.exp(x)))
    return jnp.mean((noise @ w) ** 2)


LOSSES = {
    "custom_vjp": derived,
    "custom_jvp": lambda w, x: plain(w, x) + constant(x),
    "custom_linear_solve": solved,
    "conjugate gradient": conjugate_gradient,
    "reduce": reduced,
    "gamma": sampled,
}

STYLES = {
    "pmap": lambda f: lambda w, x: lax.pmean(jax.grad(f)(w, x), "data"),
    "jc.grad": lambda f: jc.grad(f, "data"),
}


@pytest.mark.usefixtures("types_may_mix")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_that_types_refuse_gives_the_mean_of_its_replicas_gradients(name, style):
    want = mean_of_gradients(name)
    got = jc.data_parallel(STYLES[style](LOSSES[name]))(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@functools.cache
def mean_of_gradients(name):
    gradient = jax.jit(jax.grad(LOSSES[name]))
    return np.mean([gradient(W, x) for x in X.reshape(8, 2, 5)], axis=0)


def test_a_derivative_that_communicates_by_a_rule_of_its_own_is_not_local():
    """Its backward pass sums by itself, so a second trace without types would sum twice."""

    @jax.custom_vjp
    def synced(w):
        return 1 * w

    synced.defvjp(lambda w: (1 * w, None), lambda _, ct: (lax.psum(ct, "data"),))
    step = jc.data_parallel(jc.grad(lambda w, x: plain(synced(w), x), "data"), checks=True)
    with pytest.raises(ValueError, match="manual axis types do not match"):
        step(W, X)


TWICE = {
    "gradient": lambda w, x: jc.grad(plain, "data")(w, x),
    "weighted": lambda w, x: jc.grad(lambda w, x: jc.WeightedLoss(plain(w, x), 2.0), "data")(w, x),
    "all_reduce": lambda w, x: jc.all_reduce("sum", x, "data"),
    "moved": lambda w, x: -jc.grad(plain, "data")(w, x).astype(jnp.bfloat16).reshape(1, 5),
    "accumulated": lambda w, x: jc.accumulate(plain, "data", 2)(w, x)[1],
}


@pytest.mark.parametrize("checks", [None, True, False])
@pytest.mark.parametrize("what", TWICE)
def test_lax_may_not_sum_again_what_is_reduced(what, checks):
    once = TWICE[what]
    for again in (lambda x: lax.psum(x, "data"), jax.jit(lambda x: lax.psum({"a": x}, "data"))):
        step = jc.data_parallel(lambda w, x, f=again: f(once(w, x)), checks=checks)
        with pytest.raises(jc.AlreadyReducedError, match=r"`lax.psum` over 'data' \(.*refusals_of_jax"
                           r".py:\d+\) of .*this sum is 8 times too large"):  # fmt: skip
            step.trace(W, X)


@pytest.mark.parametrize("checks", [None, True, False])
def test_lax_may_sum_what_each_replica_has_chosen_of_what_is_reduced(checks):
    def step(x):
        a, b = (jc.all_reduce("sum", jnp.sum(y), "data") for y in (x, x * x))
        own = lax.axis_index("data")
        chosen = lax.cond(own > 2, lambda: a, lambda: b)
        turned = lax.while_loop(lambda c: c[0] < own, lambda c: (c[0] + 1, -c[1]), (0, a))[1]
        return lax.psum(chosen, "data"), lax.psum(turned, "data")

    chosen, turned = jc.data_parallel(step, checks=checks)(X)
    np.testing.assert_allclose(chosen, 5 * X.sum() + 3 * (X * X).sum(), rtol=1e-5)
    np.testing.assert_allclose(turned, 0, atol=1e-5)


@pytest.mark.parametrize("checks", [None, True, False])
def test_lax_may_average_what_is_reduced(checks):
    def step(w, x):
        g = jc.grad(plain, "data")(w, x)
        by_size = lax.psum(g, "data") / lax.axis_size("data")
        share = lax.psum(g * x.sum(), "data") / lax.psum(x.sum(), "data")
        return g, lax.pmean(g, "data"), jax.jit(lambda g: lax.pmean(g, "data"))(g), by_size, share

    want, *others = jc.data_parallel(step, checks=checks)(W, X)
    for other in others:
        np.testing.assert_allclose(other, want, rtol=1e-5)


BOTH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def by_columns(w, x):
    """Each replica along "model" has its columns of x and its rows of w."""
    k = lax.axis_index("model")
    mine = lax.dynamic_slice_in_dim(x, k, 1, 1) @ lax.dynamic_slice_in_dim(w, k, 1)
    return jnp.mean(lax.psum(mine, "model") ** 2)


COMPLETE = {
    "jc.grad": jc.grad(by_columns, "data"),
    "jc.value_and_grad": lambda w, x: jc.value_and_grad(by_columns, "data")(w, x)[1],
    "an own part": lambda w, x: jc.grad(by_columns, "data", argnums=1)(w, x),
    "both axes": lambda w, x: jc.grad(lambda w, x: plain(w, x), ("data", "model"))(
        w, lax.pcast(x, "model", to="varying")
    ),
    "typed": lambda w, x: jax.grad(lambda w: lax.pmean(by_columns(w, x), "data"))(w),
}


@pytest.mark.parametrize("checks", [None, True])
@pytest.mark.parametrize("name", COMPLETE)
def test_lax_may_not_sum_a_gradient_over_an_axis_where_types_have_summed_it(name, checks):
    """Along any axis of the mesh, whether the batch is split over it or not."""
    grad, w, x = COMPLETE[name], W[:4], X[:, :4]
    again = {"model": 4} if name == "an own part" else {"data": 2, "model": 4}
    rows = "concatenate" if name == "an own part" else "error"
    wrapped = lambda f: jc.data_parallel(f, mesh=BOTH, checks=checks, varying_outputs=rows)
    for axis, n in again.items():
        with pytest.raises(jc.AlreadyReducedError, match=rf"`lax.psum` over '{axis}' \(.*py:\d+\) of "
                           rf"float32.*the same on every replica already.*{n} times too large"):  # fmt: skip
            wrapped(lambda w, x, a=axis: lax.psum(grad(w, x), a)).trace(w, x)
    want = np.float32(2 / 16) * (np.outer(x @ w, w) if name == "an own part" else x.T @ (x @ w))
    for right in (grad, lambda w, x: lax.pmean(grad(w, x), "model")):
        np.testing.assert_allclose(wrapped(right)(w, x), want, rtol=1e-4, atol=1e-6)


def own_branch(w, x):
    """Each replica's loss takes a branch by its own rows."""
    return lax.cond(x[0, 0] > 0, lambda: w, lambda: 3 * w).sum() * jnp.mean(x)


CHOICES = {
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: w, lambda: 3 * w),
    "while": lambda w, x: lax.while_loop(lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, 2 * c[1]),
                                         (0.0, w))[1],
    "used": lambda w, x: jax.jit(lambda w: lax.cond(x[0, 0] > 0, lambda: w, lambda: 3 * w) + w)(w),
    "skipped step": lambda w, x: lax.cond(jnp.isfinite(x.sum()), lambda w, g: w - g,
                                          lambda w, g: w, w, jc.grad(plain, "data")(w, x)),
}  # fmt: skip


@pytest.mark.parametrize("checks", [None, True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_what_each_replica_chooses_for_itself_is_not_returned_as_one(name, checks):
    """JAX types a branch that each replica takes for itself as the same, which it is not."""
    with pytest.raises(ValueError, match=r"differs between replicas \(it varies over 'data'\)"):
        jc.data_parallel(CHOICES[name], checks=checks).trace(W, X)


@pytest.mark.parametrize("checks", [None, True, False])
def test_what_every_choice_hands_on_and_what_is_reduced_afterwards_is_returned(checks):
    def step(w, x):
        kept, own = lax.cond(x[0, 0] > 0, lambda: (w, 1.0), lambda: (w, 3.0))
        again, _ = lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0], c[1] + own), (w, x[0, 0]))
        same = lax.cond(lax.psum(x.sum(), "data") > 0, lambda: w, lambda: w + 0)
        return kept, again, same, lax.psum(own, "data"), jc.grad(own_branch, "data")(w, x)

    kept, again, same, total, gradient = jc.data_parallel(step, checks=checks)(W, X)
    for each in (kept, again, same):
        np.testing.assert_array_equal(each, W)
    factors = np.where(X[::2, 0] > 0, 1.0, 3.0)
    np.testing.assert_allclose(total, factors.sum())
    want = np.mean(factors * X.reshape(8, 10).mean(1))
    np.testing.assert_allclose(gradient, np.full(5, want), rtol=1e-5)


def branch_of_rows(w, x):
    """What types would sum stands in one of the branches, which not all replicas take."""
    return lax.cond(x[0, 0] > 0, lambda: plain(w, x), lambda: 0 * jnp.sum(x))


def weighted_by_choice(w, x):
    return lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 3.0) * plain(w, x)


@pytest.mark.parametrize("f", [own_branch, branch_of_rows, weighted_by_choice,
                               jax.checkpoint(weighted_by_choice)])  # fmt: skip
def test_a_derivative_through_what_each_replica_chooses_is_right_or_refused(f):
    """Types sum before the choice and not after it; or in one branch, where the others never come."""
    want = np.mean([jax.grad(f)(W, x) for x in X.reshape(8, 2, 5)], axis=0)
    typed = lambda w, x: jax.grad(lambda w: lax.pmean(f(w, x), "data"))(w)
    averaged = lambda w, x: lax.pmean(typed(w, x), "data")
    by_jc = lambda w, x: jc.grad(f, "data")(w, x)
    found = jc.data_parallel(lambda w, x: (averaged(w, x), by_jc(w, x)))(W, X)
    for each in found:
        np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-6)
    if f not in (own_branch, branch_of_rows):  # no cotangent meets the choice before it is summed
        np.testing.assert_allclose(jc.data_parallel(typed)(W, X), want, rtol=1e-4, atol=1e-6)
        return
    for step, checks in ((typed, None), (typed, True), (averaged, True)):
        with pytest.raises(ValueError, match=r"goes through a branch or a loop that each replica "
                           r"chooses for itself \(.*refusals_of_jax.py:\d+\).*float32\[5\]"):  # fmt: skip
            jc.data_parallel(step, checks=checks).trace(W, X)


USED = {
    "jc.grad": lambda w, x: jc.grad(plain, "data")(w, x),
    "jc.accumulate": lambda w, x: jc.accumulate(plain, "data", 2)(w, x)[1],
    "sharded": lambda w, x: jc.sharded_optimizer(optax.adam(0.1), "data").init(w),
}


@pytest.mark.usefixtures("types_may_mix")
@pytest.mark.parametrize("checks", [None, True, False])
@pytest.mark.parametrize("name", USED)
def test_what_each_replica_chooses_for_itself_is_not_taken_for_a_parameter(name, checks):
    step = lambda w, x: USED[name](CHOICES["cond"](w, x), x)
    with pytest.raises(ValueError, match="differs between replicas, or nothing shows that it does"):
        jc.data_parallel(step, checks=checks).trace(W, X)
