"""Which reductions a loop repeats without need, read off programs that do not all use jaxcoll."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mapped
from jax import lax

import jaxcoll as jc
from jaxcoll._jaxpr.loop_reductions import repeated_reductions

P = jax.sharding.PartitionSpec
W, ROWS = jnp.ones((3, 4)), np.ones((16, 3), "f")


def loss(w, row):
    return jnp.sum(jnp.tanh(row[None] @ w) ** 2)


def local(w):
    return lax.pcast(w, "data", to="varying")


def gradients_summed_by_autodiff(w, x):
    """The gradient of a replicated parameter is reduced by autodiff, in every turn."""
    add = lambda total, row: (total + jax.grad(loss)(w, row), None)
    return lax.scan(add, jnp.zeros_like(w), x)[0]


def gradients_reduced_by_jaxcoll(w, x, **settings):
    options = jc.CommunicationOptions(**settings)
    add = lambda total, row: (
        jax.tree.map(jnp.add, total, jc.value_and_grad(loss, "data", options=options)(w, row)),
        None,
    )
    return lax.scan(add, (jnp.zeros(()), jnp.zeros_like(w)), x)[0]


def a_metric_of_every_turn(w, x):
    def turn(carry, row):
        w, total = carry
        value, grad = jax.value_and_grad(loss)(w, row)
        return (w - 0.1 * grad, total + lax.pmean(value, "data")), None

    return lax.scan(turn, (local(w), jnp.zeros(())), x)[0][1]


def from_an_inner_loop(w, x):
    """Each layer's gradient reduced in its turn and kept, and these added up outside."""

    def turn(total, row):
        grads = lax.scan(lambda _, w: (None, lax.psum(jax.grad(loss)(local(w), row), "data")), None,
                         jnp.stack([w, w]))[1]  # fmt: skip
        return total + grads.astype(jnp.float32), None

    return lax.scan(turn, jnp.zeros((2, *w.shape)), x)[0]


def in_a_while_loop(w, x):
    add = lambda i, total: total + lax.psum(x[i].sum(), "data")
    return lax.fori_loop(0, jnp.argmax(w), add, jnp.zeros(()))


REPEATED = [
    gradients_summed_by_autodiff,
    gradients_reduced_by_jaxcoll,
    functools.partial(gradients_reduced_by_jaxcoll, bytes_per_pack=1 << 10),
    functools.partial(gradients_reduced_by_jaxcoll, reproducible=True),
    a_metric_of_every_turn,
    from_an_inner_loop,
    in_a_while_loop,
]


def training(w, x):
    """A loop over steps: each needs the parameters of the last."""
    return lax.scan(lambda w, row: (w - 0.1 * jc.grad(loss, "data")(w, row), None), w, x)[0]


def training_of_one_number(w, x):
    step = lambda w, row: (w + lax.pmean(jnp.sin(local(w)) * row[0], "data"), None)
    return lax.scan(step, w[0, 0], x)[0]


def momentum(w, x):
    step = lambda m, row: (0.9 * m + jc.grad(loss, "data")(w, row), None)
    return lax.scan(step, jnp.zeros_like(w), x)[0]


def layers_reduced_one_by_one(w, x):
    reduce = lambda _, w: (None, lax.psum(jax.grad(loss)(local(w), x[0]), "data"))
    return lax.scan(reduce, None, jnp.stack([w, w]))[1]


def statistics(w, x):
    def turn(total, row):
        centred = row - lax.pmean(row, "data")
        return total + jax.grad(loss)(local(w), centred), None

    return lax.psum(lax.scan(turn, local(jnp.zeros_like(w)), x)[0], "data")


def looked_at_in_the_loop(w, x):
    def turn(total, row):
        total = total + lax.psum(row.sum(), "data")
        return total, total

    return lax.scan(turn, jnp.zeros(()), x)


def after_the_loop(w, x):
    return jc.accumulate(lambda w, x: jnp.mean(x @ w), "data", 2)(w, x)


NEEDED = [
    training,
    training_of_one_number,
    momentum,
    layers_reduced_one_by_one,
    statistics,
    looked_at_in_the_loop,
    after_the_loop,
]


def found(f):
    return repeated_reductions(mapped(f, (P(), P("data"))).trace(W, ROWS).jaxpr)


@pytest.mark.parametrize("f", REPEATED, ids=range(len(REPEATED)))
def test_what_is_only_added_up_is_found(f):
    assert found(f)
    assert all("test_loop_reductions.py:" in each.line for each in found(f))


@pytest.mark.parametrize("f", NEEDED, ids=lambda f: f.__name__)
def test_what_a_loop_needs_in_every_turn_is_not(f):
    assert found(f) == ()
