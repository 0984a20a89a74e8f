"""What JAX's types and names do not show is found all the same: sums, hosts, batches that are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import grid
from jax import lax

import jaxcoll as jc

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 5)).astype("f")
W = RNG.standard_normal(5).astype("f")


def loss(w, x):
    """Of one replica's share."""
    return jnp.mean(jnp.tanh(x @ w) ** 2)


WANT = np.asarray(jax.grad(loss)(W, X))


def gives_one_devices(step):
    np.testing.assert_allclose(jc.data_parallel(step)(W, X), WANT, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scope", ["transpose_net", "all_reduce_grads", "rematted_block"])
def test_the_names_of_a_users_scopes_mean_nothing(scope):
    named = jax.named_scope(scope)
    gives_one_devices(named(lambda w, x: lax.pmean(jax.grad(loss)(w, x), "data")))
    gives_one_devices(lambda w, x: lax.pmean(jax.grad(named(loss))(w, x), "data"))
    twice = named(lambda w, x: lax.psum(jc.grad(loss, "data")(w, x), "data"))
    with pytest.raises(jc.AlreadyReducedError, match="8 times too large"):
        jc.data_parallel(twice).trace(W, X)


@jax.custom_vjp
def tripled(x):
    return 3 * x


tripled.defvjp(lambda x: (3 * x, None), lambda _, ct: (3.0 * ct,))


def ruled(w, x):
    """The loss by a rule with a constant of its own."""
    return jnp.mean(tripled(jnp.tanh(x @ w) ** 2)) / 3


def pulled(f, w, x):
    """A gradient whose cotangent is made by hand."""
    value, back = jax.vjp(lambda w: f(w, x), w)
    return back(jnp.ones_like(value))[0]


@pytest.mark.parametrize("f", [ruled, jax.checkpoint(ruled), jax.jit(ruled)],
                         ids=["plain", "remat", "jit"])  # fmt: skip
def test_a_constant_in_a_rule_of_differentiation_is_no_reduced_loss(f):
    gives_one_devices(lambda w, x: lax.pmean(pulled(f, w, x), "data"))
    gives_one_devices(lambda w, x: pulled(lambda w, x: lax.pmean(f(w, x), "data"), w, x))
    with pytest.raises(ValueError, match="each replica's own gradient"):
        jc.data_parallel(lambda w, x: pulled(f, w, x)).trace(W, X)


def written(w, x):
    place = jax.new_ref(w)
    place[0] = x.sum()
    return place[...]


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
GROUPS = [[0, 1, 2], [3, 4, 5, 6, 7]]
UNSEEN = {
    "a reduction in groups": lambda w, x: lax.pmax(x.sum(), "data", axis_index_groups=GROUPS),
    "the function of a solver": lambda w, x: lax.custom_linear_solve(
        lambda v: v * x.sum(), w, lambda matvec, b: b / matvec(jnp.ones(5))
    ),
    "computed by the host": lambda w, x: w + jax.pure_callback(np.sum, SCALAR, x),
    "from the host": lambda w, x: jax.experimental.io_callback(lambda: np.float32(1), SCALAR) * w,
    "random bits of a device": lambda w, x: lax.rng_uniform(0.0, 1.0, (2,)),
    "a reference": written,
    "through a loop": lambda w, x: lax.fori_loop(
        0, 3, lambda i, w: w + jax.pure_callback(np.sum, SCALAR, x), w
    ),
}


@pytest.mark.parametrize("checks", [None, True, False])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_differs_though_its_type_is_the_same_is_not_returned_as_one(name, checks):
    # JAX 0.12 refuses the reference itself, where types are on.
    with pytest.raises(ValueError, match=r"\(it varies over 'data'\)|match the Ref's"):
        jc.data_parallel(UNSEEN[name], checks=checks).trace(W, X)


def test_what_the_host_computes_of_what_is_the_same_is_returned():
    step = lambda w, x: (
        jax.pure_callback(np.sum, SCALAR, w)
        + lax.psum(jax.pure_callback(np.sum, SCALAR, x), "data")
    )
    found = jc.data_parallel(step, checks=True)(W, X)
    np.testing.assert_allclose(found, W.sum() + X.sum(), rtol=1e-5)


def test_what_holds_no_array_is_no_batch():
    """A mask that is left out does not make every replica count all rows."""
    step = jc.data_parallel(
        lambda w, rows, mask: jc.all_reduce(
            "sum", (w * rows).sum() if mask is None else 0 * rows.sum(), "data"
        )
    )
    for nothing in (None, {}, None):
        want = 2 * X.sum() * (nothing is None)
        np.testing.assert_allclose(step(2.0, X, nothing), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"args\[1\] \(`rows`\) has 16 rows as well"):
        step(2.0, X, np.ones(16, "f"))
    np.testing.assert_array_equal(jc.data_parallel(lambda w, nothing: w)(X, {}), X)


def test_one_row_for_each_replica_is_no_batch_if_it_broadcasts():
    step = jc.data_parallel(
        lambda w, rows, scale: jc.all_reduce("sum", (rows * scale).sum(), "data")
    )
    with pytest.raises(ValueError, match=r"args\[1\] \(`rows`\) has 16 rows, against which each "
                                         r"replica's one row would broadcast.*Pass `batch_argnums`"):  # fmt: skip
        step(1.0, np.ones((16, 8), "f"), np.ones(8, "f"))
    table = jc.data_parallel(lambda w, table, x: jc.all_reduce("sum", (x @ w).sum(), "data"))
    np.testing.assert_allclose(table(W, np.ones((16, 7), "f"), X[:8]), (X[:8] @ W).sum(), rtol=1e-4)


def by_row(w, x):
    """The loss by a loop from a constant, which types refuse."""
    return lax.scan(lambda total, row: (total + jnp.tanh(row @ w) ** 2, None), 0.0, x)[0] / len(x)


@pytest.mark.parametrize(("f", "checks"), [(loss, False), (by_row, None), (by_row, False)])
def test_a_reduced_loss_is_not_differentiated_by_shards_without_types(f, checks):
    """Each replica's copy of it would count; under types it is one loss."""
    shards = jc.shard(W, "data")
    whole = lambda shards: jc.all_gather(shards, "data")

    def reduced(shards, x):
        return whole(jax.grad(lambda s: lax.pmean(f(whole(s), x), "data"))(shards))

    def normed(s, x):
        own = whole(s) - lax.pmean(x.mean(0), "data")
        return f(own, x - lax.pmean(x.mean(0) * own, "data")[None])

    with pytest.raises(ValueError, match="differentiated by `Shards` where types say nothing"):
        jc.data_parallel(reduced, checks=checks).trace(shards, X)
    if f is loss:
        np.testing.assert_allclose(jc.data_parallel(reduced)(shards, X), WANT, rtol=1e-4, atol=1e-6)
    jc.data_parallel(lambda s, x: whole(jc.grad(normed, "data")(s, x)), checks=checks).trace(
        shards, X
    )


@pytest.mark.parametrize("checks", [None, False])
def test_the_norm_of_what_is_the_same_is_not_taken_over_replicas_without_types(checks):
    def step(w, x, reduce):
        total, _ = lax.scan(lambda c, row: (c + row[0], None), 0.0, x)  # which types refuse
        return jc.global_norm(reduce(jax.grad(loss)(w, x)), "data") + 0 * lax.pmean(total, "data")

    def by(reduce):
        return jc.data_parallel(lambda w, x: step(w, x, reduce), checks=checks)

    for same in (lambda g: lax.pmean(g, "data"), lambda g: jc.all_reduce("mean", g, "data")):
        # Where no meaning holds, what types refuse first is shown.
        with pytest.raises((jc.AlreadyReducedError, TypeError), match="already the same|scan body"):
            by(same)(W, X)
    each = [np.asarray(jax.grad(loss)(W, rows)) for rows in np.split(X, 8)]
    own = by(lambda g: g)(W, X)
    np.testing.assert_allclose(own, np.linalg.norm(np.concatenate(each)), rtol=1e-5)


def looping(w, x):
    """The loss beside a loop from a constant, which types refuse."""
    return loss(w, x) + 0 * lax.fori_loop(0, 2, lambda i, c: c + (x @ w).sum(), 0.0)


MEANS = {
    "lax": lambda x: lax.pmean(x, "data"),
    "packed": lambda x: jc.all_reduce("mean", x, "data"),
    "ring": lambda x: jc.all_reduce("mean", x, "data", options=jc.CommunicationOptions(
        implementation="ring")),
    "twice": lambda x: lax.pmean(lax.pmean(x, "data"), "data"),
}  # fmt: skip


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_a_reduced_loss_has_one_derivative_by_the_batch_or_none(mean):
    """Without types it is as many times too large as there are replicas."""

    def by_rows(f):
        return lambda w, x: jax.grad(lambda x: mean(f(w, x)))(x)

    rows = jc.data_parallel(by_rows(loss), varying_outputs="concatenate")
    np.testing.assert_allclose(rows(W, X), jax.grad(loss, 1)(W, X), rtol=1e-4, atol=1e-6)
    for step in (by_rows(looping), lambda w, x: 2 * x - jax.checkpoint(by_rows(looping))(w, x)):
        with pytest.raises(ValueError, match="the output of the step comes from the derivative"):
            jc.data_parallel(step, varying_outputs="concatenate").trace(W, X)
        jc.data_parallel(step, varying_outputs="concatenate", checks=False).trace(W, X)


def by_params(w, x, mean=MEANS["lax"], f=looping):
    """On a replica a term of the derivative of the mean, which is the mean of these."""
    return jax.grad(lambda w: mean(f(w, x)))(w)


def by_rows(w, x):
    return jax.grad(lambda x: lax.pmean(looping(w, x), "data"))(x)


def in_all_outputs(w, x):
    """The loss of all replicas, by each of them."""
    outputs = lax.all_gather(x @ w + 0 * looping(w, x), "data", tiled=True)
    return jnp.mean(outputs**2)


NOT_MEANS = {
    "summed": lambda w, x: lax.psum(by_params(w, x), "data"),
    "summed in another program": lambda w, x: jax.jit(lambda g: lax.psum((g, 1), "data"))(
        by_params(w, x, MEANS["packed"])),
    "summed by jc": lambda w, x: jc.all_reduce("sum", by_params(w, x), "data"),
    "scattered": lambda w, x: jc.all_gather(
        jc.reduce_scatter("sum", by_params(w, x), "data"), "data"),
    "gathered": lambda w, x: lax.all_gather(by_rows(w, x), "data", tiled=True),
    "gathered by jc": lambda w, x: jc.all_gather(by_rows(w, x), "data"),
    "gathered by a ring": lambda w, x: jc.all_gather(
        by_rows(w, x), "data", options=jc.CommunicationOptions(implementation="ring")),
    "largest": lambda w, x: lax.pmax(by_rows(w, x).max(), "data"),
    "norm": lambda w, x: lax.psum(jnp.sum(by_rows(w, x) ** 2), "data"),
    "clipped": lambda w, x: lax.pmean(jnp.clip(by_params(w, x), -0.1, 0.1), "data"),
    "chosen by": lambda w, x: lax.pmean(
        lax.cond(by_params(w, x).sum() > 0, lambda: w, lambda: 3 * w), "data"),
    "perturbed": lambda w, x: jc.grad(loss, "data")(w, x + by_rows(w, x)),
    "one loss of all outputs": lambda w, x: lax.psum(jax.grad(in_all_outputs)(w, x), "data"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_MEANS)
def test_of_a_reduced_loss_without_types_only_the_mean_of_its_derivatives_is_used(name):
    with pytest.raises(ValueError, match="of the step comes from the derivative of a loss "
                       "that was reduced|already the same on every replica"):  # fmt: skip
        jc.data_parallel(NOT_MEANS[name]).trace(W, X)
    jc.data_parallel(NOT_MEANS[name], checks=False).trace(W, X)


def test_the_sum_of_a_reduced_losss_gradient_is_refused_as_types_refuse_it():
    for mean in MEANS.values():
        step = lambda w, x, m=mean: jc.all_reduce("sum", by_params(w, x, m, loss), "data")
        with pytest.raises(jc.AlreadyReducedError, match="autodiff has summed this gradient"):
            jc.data_parallel(step).trace(W, X)


def test_whatever_is_linear_may_come_before_the_mean_of_a_derivative():
    def step(w, x):
        own = by_params(w, x)
        scale = lax.axis_size("data")
        finite = lax.pmin(jnp.isfinite(own).all().astype(int), "data")
        whole = jc.all_gather(jc.reduce_scatter("mean", own, "data"), "data")
        moved = w - lax.pmean(w - 2 * own.reshape(5, 1)[:, 0], "data")
        by_hand = lax.psum_scatter(jnp.tile(own, 8), "data", tiled=True) / scale
        signs = jc.grad(loss, "data")(w, x + jnp.sign(by_rows(w, x)))
        means = lax.pmean(own, "data"), lax.psum(own, "data") / scale, whole, moved / 2
        gathered = lax.all_gather(by_hand, "data", tiled=True)[:5]
        return (*means, jc.all_reduce("mean", own, "data"), gathered), finite, signs

    means, finite, signs = jc.data_parallel(step)(W, X)
    for mean in means:
        np.testing.assert_allclose(mean, WANT, rtol=1e-4, atol=1e-6)
    moved = X + np.sign(jax.grad(loss, 1)(W, X))
    np.testing.assert_allclose(signs, jax.grad(loss)(W, moved), rtol=1e-4, atol=1e-6)
    assert finite


def test_a_mean_over_one_axis_after_another_is_the_mean_of_a_derivative():
    both = ("node", "data")

    def step(w, x):
        own, half = (
            jax.grad(lambda w, a=axes: lax.pmean(looping(w, x), a))(w) for axes in (both, "node")
        )
        twice = lax.pmean(lax.pmean(own, "node"), "data")
        return twice, lax.pmean(half, both), jc.all_reduce("mean", own, both)

    for mean in jc.data_parallel(step, mesh=grid(2, 4), axis_name=both)(W, X):
        np.testing.assert_allclose(mean, WANT, rtol=1e-4, atol=1e-6)
    summed = lambda w, x: lax.psum(step(w, x)[0] + lax.pmean(by_params(w, x), "node"), "data")
    with pytest.raises(ValueError, match="derivative of a loss that was reduced over 'data'"):
        jc.data_parallel(summed, mesh=grid(2, 4), axis_name=both).trace(W, X)


def test_what_a_reduced_loss_leaves_unsaid_is_not_refused():
    """Of the same steps: reduced gradients, local losses, statistics of all rows, both outputs."""

    def step(w, x):
        grads = lax.pmean(jax.grad(lambda w: lax.pmean(looping(w, x), "data"))(w), "data")
        mean = lambda x: lax.pmean(x.mean(0), "data")
        local = lambda x: looping(w - grads, x - mean(x)[None]) / lax.axis_size("data")
        return grads, x @ (w - grads), jax.grad(local)(x)

    grads, rows, own = jc.data_parallel(step, varying_outputs="concatenate")(W, X)
    np.testing.assert_allclose(grads[:5], WANT, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rows, X @ (W - WANT), rtol=1e-4, atol=1e-5)
    by_hand = jax.grad(lambda x: loss(W - WANT, x - x.mean(0)[None]))(jnp.asarray(X))
    np.testing.assert_allclose(own, by_hand, rtol=1e-3, atol=1e-5)
