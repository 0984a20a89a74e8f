"""N devices equal one device: value_and_grad in every mode, for every kind of mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPTIONS, close, lowered, on_replicas, refused, run, split

import jaxcoll as jc

P = jax.sharding.PartitionSpec
WAYS = ("checked", "unchecked", "pmap", "vmap")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 5)).astype("f")
Y = RNG.standard_normal((16, 3)).astype("f")
PARAMS = {"w": RNG.standard_normal((5, 3)).astype("f"), "b": np.zeros(3, "f")}
# Of eight replicas the share of one is all padding, of another half of it.
WEIGHT = np.repeat([1.0, 0.0, 1.0, 1.0], 4).astype("f")
WEIGHT[5:9] = [0, 0, 1, 0]


def predict(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def mean_loss(p, x, y):
    return jnp.mean((predict(p, x) - y) ** 2)


def sum_loss(p, x, y):
    return jnp.sum((predict(p, x) - y) ** 2)


def scanned_loss(p, x, y):
    """A loop whose carry starts from a constant: the plain way to write it on one device."""

    def body(total, row):
        return total + jnp.mean((predict(p, row[0][None]) - row[1][None]) ** 2), None

    total, _ = jax.lax.scan(body, 0.0, (x, y))
    return total / x.shape[0]


def while_loss(p, x, y):
    body = lambda i, total: total + jnp.mean((predict(p, x[i][None]) - y[i][None]) ** 2)
    return jax.lax.fori_loop(0, x.shape[0], body, jnp.zeros(())) / x.shape[0]


def branching_loss(p, x, y):
    chosen = jax.lax.cond(x[0, 0] > -100, lambda: mean_loss(p, x, y), lambda: jnp.zeros(()))
    return chosen


def checkpointed_loss(p, x, y):
    return jax.checkpoint(mean_loss)(p, x, y)


def jitted_loss(p, x, y):
    return jax.jit(mean_loss)(p, x, y)


MEANS = {
    f.__name__: f for f in (mean_loss, scanned_loss, branching_loss, checkpointed_loss, jitted_loss)
}


def weighted_loss(p, x, y, w):
    errors = jnp.mean((predict(p, x) - y) ** 2, axis=1)
    return jc.WeightedLoss(jnp.sum(w * errors), jnp.sum(w))


def scaled_loss(s, p, x, y):
    return s * mean_loss(p, x, y)


def with_aux(p, x, y):
    return mean_loss(p, x, y), x[0, 0]


@functools.cache
def on_one_device(loss):
    return jax.jit(jax.value_and_grad(loss))(PARAMS, X, Y)


@functools.cache
def scaled_alone():
    return jax.jit(jax.value_and_grad(scaled_loss, argnums=(0, 1)))(2.0, PARAMS, X, Y)


@functools.cache
def found(runner, n):
    """What every kind of loss and call gives, in one program for each way to map."""

    def f(x, y, w):
        call = lambda loss, *args, **how: jc.value_and_grad(loss, "data", **how)(*args)
        (value, aux), grads = call(with_aux, PARAMS, x, y, has_aux=True)
        again, aux_again = jc.grad(with_aux, "data", has_aux=True)(PARAMS, x, y)
        untyped = () if runner != "checked" else (scanned_loss, branching_loss)
        means = {k: f for k, f in MEANS.items() if f not in untyped}
        found = {
            "means": {k: call(loss, PARAMS, x, y) for k, loss in means.items()},
            # The batch enters through the closure: autodiff must still not sum by itself.
            "captured": call(lambda p: mean_loss(p, x, y), PARAMS),
            "sum": call(sum_loss, PARAMS, x, y, reduce_op="SUM"),
            "weighted": call(weighted_loss, PARAMS, x, y, w),
            "aux": ((value, grads), again, jc.all_reduce("sum", [aux - aux_again, aux], "data")),
            "argnums": [
                call(scaled_loss, 2.0, PARAMS, x, y, argnums=k) for k in (1, -3, (0, 1), (1, 0))
            ],
        }
        if runner in ("pmap", "unchecked"):
            # Reverse mode cannot pass a fori_loop with a traced bound; a static one is a scan.
            found["means"]["while"] = call(while_loss, PARAMS, x, y)
        if runner != "vmap":
            ones = jax.tree.map(jnp.ones_like, PARAMS)
            g = lambda p: jc.grad(mean_loss, "data")(p, x, y)
            found["hessian"] = jax.jvp(g, (PARAMS,), (ones,))[1]
        return found

    return on_replicas(runner, f, n, X, Y, WEIGHT)


EVERY = pytest.mark.parametrize(("runner", "n"), [(r, n) for n in (8, 1) for r in WAYS])


@EVERY
def test_means_and_sums_are_those_of_one_device(runner, n):
    got = found(runner, n)
    for name, each in {**got["means"], "captured": got["captured"]}.items():
        close(each, on_one_device(mean_loss), err_msg=name)
    close(got["sum"], on_one_device(sum_loss), rtol=1e-4, atol=1e-4)


def weighted_mean(p, x, y):
    loss = weighted_loss(p, x, y, WEIGHT)
    return loss.total / loss.weight


@EVERY
def test_a_weighted_mean_is_exact_for_uneven_shares(runner, n):
    close(found(runner, n)["weighted"], on_one_device(weighted_mean))


@EVERY
def test_aux_comes_back_as_each_replicas_own(runner, n):
    got, again, (zero, firsts) = found(runner, n)["aux"]
    close(got, on_one_device(mean_loss))
    close(again, got[1])
    assert zero == 0
    np.testing.assert_allclose(firsts, X[:: 16 // n, 0].sum(), rtol=1e-6)


@EVERY
def test_gradients_are_by_the_arguments_that_are_named(runner, n):
    value, grads = scaled_alone()
    (first, second, both, other_way) = found(runner, n)["argnums"]
    for each in (first, second):
        close(each, (value, grads[1]))
    close(both, (value, grads))
    close(other_way, (value, grads[::-1]))


@pytest.mark.parametrize("runner", ["checked", "unchecked", "pmap"])
def test_hessian_vector_products_go_through(runner):
    ones = jax.tree.map(np.ones_like, PARAMS)
    want = jax.jit(lambda v: jax.jvp(lambda p: jax.grad(mean_loss)(p, X, Y), (PARAMS,), (v,))[1])
    close(found(runner, 8)["hessian"], want(ones), rtol=1e-4, atol=1e-5)


def test_keyword_arguments_are_handed_on():
    f = jc.grad(lambda p, *, x: jnp.mean(p * x), "data")
    assert run("checked", lambda x: f(2.0, x=x), 4, jnp.arange(4.0))[0] == 1.5


@pytest.mark.parametrize("name", ["ring", "packed"])
def test_options_reach_the_reduction(name):
    f = jc.value_and_grad(mean_loss, "data", options=OPTIONS[name])
    text = lowered(lambda x, y: f(PARAMS, x, y), 4, *split(4, (X, Y))).as_text()
    assert ("collective_permute" in text) == (name == "ring")
    assert text.count('"stablehlo.all_reduce"') == (0 if name == "ring" else 2)


@pytest.mark.parametrize(("call", "count"), [(jc.value_and_grad, 3), (jc.grad, 2)])
def test_value_and_gradient_travel_together_and_autodiff_adds_nothing(call, count):
    """One requested all-reduce a leaf: loss, bias, weight. None that autodiff put there."""
    f = call(mean_loss, "data")
    text = lowered(lambda x, y: f(PARAMS, x, y), 8, *split(8, (X, Y))).as_text()
    assert text.count('"stablehlo.all_reduce"') == count


@pytest.mark.parametrize("how", ["step", "strategy", "pmap", "unchecked", "checked"])
def test_a_loss_that_is_averaged_inside_has_the_gradient_of_the_mean(how):
    def averaged(p, x, y):
        return jax.lax.pmean(mean_loss(p, x, y), "data")

    def f(x, y):
        return jc.value_and_grad(averaged, "data")(PARAMS, x, y)

    if how == "checked":  # where types show that it is reduced
        with pytest.raises(jc.errors.AlreadyReducedError, match=r"the loss is already the same"):
            on_replicas(how, f, 8, X, Y)
        return
    if how == "step":
        got = jc.data_parallel(f, batch_argnums=(0, 1))(X, Y)
    elif how == "strategy":
        strategy = jc.MirroredStrategy(devices=jax.devices()[:4])
        averaged_there = lambda *args: jax.lax.pmean(mean_loss(*args), "replica")
        rows = zip(*split(4, (X, Y)), strict=True)
        x, y = ([jnp.asarray(r) for r in each] for each in zip(*rows, strict=True))
        got = strategy.run(
            lambda x, y: jc.value_and_grad(averaged_there)(PARAMS, x, y),
            (jc.PerReplica(x), jc.PerReplica(y)),
        )
        got = strategy.experimental_local_results(got)[0]
    else:
        got = on_replicas(how, f, 8, X, Y)
    close(got, on_one_device(mean_loss))


def test_a_loop_from_a_constant_is_refused_by_jaxs_types():
    f = lambda x, y: jc.grad(scanned_loss, "data")(PARAMS, x, y)
    with pytest.raises(TypeError, match="manual axis types"):
        on_replicas("checked", f, 8, X, Y)


@pytest.mark.parametrize(
    ("error", "loss", "settings", "words"),
    [
        (TypeError, lambda p, x: p * x, {}, r"scalar or a `jc.WeightedLoss`; got float32\[4\]"),
        (TypeError, lambda p, x: {"loss": p}, {}, r"got dict\. Return its mean"),
        (TypeError, lambda p, x: None, {}, "got NoneType"),
        (TypeError, lambda p, x: (p * x, 1.0), {}, r"a tuple of 2.*has_aux=True.*jc.WeightedLoss\(total, weig"),
        (TypeError, lambda p, x: jnp.mean(p * x), {"has_aux": True}, r"to return \(loss, aux\); got float32\[\]"),
        (ValueError, lambda p, x: jc.WeightedLoss(p, 1.0), {"reduce_op": "sum"}, "got a WeightedLoss with reduce_op SUM"),
        (ValueError, lambda p, x: jc.WeightedLoss(p, x), {}, "the weight of a WeightedLoss to be a scalar.*got shape"),
        (ValueError, lambda p, x: jc.WeightedLoss(x, p), {}, "the total of a WeightedLoss to be a scalar.*got shape"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("made", [jc.value_and_grad, jc.grad, jc.accumulate])
def test_what_is_no_loss_is_refused(error, loss, settings, words, made):
    step = made(loss, "data", *[1] * (made is jc.accumulate), **settings)
    refused(
        f"`jc.{made.__name__}`.*{words}", step, np.ones(2, "f"), np.ones((2, 4), "f"), error=error
    )


def test_a_type_error_of_the_users_own_stays_their_own():
    def broken(p, x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        run("checked", lambda x: jc.grad(broken, "data")(1.0, x), 2, jnp.ones(2))


@pytest.mark.parametrize("runner", WAYS)
def test_a_loss_may_reduce_statistics_on_the_way(runner):
    """Batch normalisation over all replicas; with a constant carry too, where types allow it."""
    asked = [jc.CommunicationOptions(algorithm=a) for a in (None, "ring", "halving_doubling")]

    def loss(p, x, y, options, scanned):
        h = predict(p, x)
        mean = jc.all_reduce("mean", jnp.mean(h, axis=0, keepdims=True), "data", options=options)
        errors = (h - mean - y) ** 2
        if not scanned:
            return jnp.mean(errors)
        return jax.lax.scan(lambda c, e: (c + jnp.mean(e), None), 0.0, errors)[0] / x.shape[0]

    def grads(x, y, scanned):
        call = jc.value_and_grad(loss, "data")
        return [call(PARAMS, x, y, options, scanned) for options in asked]

    kinds = (False,) if runner == "checked" else (False, True)

    def whole(p):
        h = predict(p, X)
        return jnp.mean((h - jnp.mean(h, axis=0, keepdims=True) - Y) ** 2)

    got = on_replicas(runner, lambda x, y: [grads(x, y, kind) for kind in kinds], 4, X, Y)
    want = jax.jit(jax.value_and_grad(whole))(PARAMS)
    for each in (one for kind in got for one in kind):
        close(each, want)
