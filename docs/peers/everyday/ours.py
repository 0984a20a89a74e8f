"""Everyday tasks with jaxcoll."""

import jax
import jax.numpy as jnp
import optax
from problem import CLIP, RATE

import jaxcoll as jc


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def train_step(w, x, y):
    @jc.data_parallel(batch_argnums=(1, 2))
    def step(w, x, y):
        value, grads = jc.value_and_grad(loss, "data")(w, x, y)
        return w - RATE * grads, value

    return step(w, x, y)[0]


def accumulate(w, x, y):
    @jc.data_parallel(batch_argnums=(1, 2))
    def step(w, x, y):
        value, grads = jc.accumulate(loss, "data", 4, batch_argnums=(1, 2))(w, x, y)
        return w - RATE * grads, value

    return step(w, x, y)[0]


def clip(w, x, y):
    @jc.data_parallel(batch_argnums=(1, 2))
    def step(w, x, y):
        value, grads = jc.value_and_grad(loss, "data")(w, x, y)
        return w - RATE * grads * jnp.minimum(1, CLIP / jc.global_norm(grads)), value

    return step(w, x, y)[0]


def uneven_rows(w, x, y, real):
    def weighted(w, x, y, real):
        return jc.WeightedLoss(jnp.sum((x @ w - y) ** 2 * real), jnp.sum(real))

    @jc.data_parallel(batch_argnums=(1, 2, 3))
    def step(w, x, y, real):
        value, grads = jc.value_and_grad(weighted, "data")(w, x, y, real)
        return w - RATE * grads, value

    return step(w, x, y, real)[0]


def sharded_optimizer(w, x, y):
    adam = jc.sharded_optimizer(optax.adam(RATE), "data")
    state = adam.init(w)

    @jc.data_parallel(batch_argnums=(2, 3))
    def step(w, state, x, y):
        value, grads = jc.value_and_grad(loss, "data", scatter=True)(w, x, y)
        updates, state = adam.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    return step(w, state, x, y)[0]


def sharded_parameters(w, x, y):
    def whole(w, x, y):
        return loss(jc.all_gather(w, "data"), x, y)

    @jc.data_parallel(batch_argnums=(1, 2))
    def step(w, x, y):
        value, grads = jc.value_and_grad(whole, "data")(w, x, y)
        return jax.tree.map(lambda p, g: p - RATE * g, w, grads), value

    return jc.unshard(step(jc.shard(w, "data"), x, y)[0])


def skip_not_finite(w, x, y):
    @jc.data_parallel(batch_argnums=(1, 2))
    def step(w, x, y):
        value, grads = jc.value_and_grad(loss, "data")(w, x, y)
        return jnp.where(jc.all_finite(grads), w - RATE * grads, w), value

    return step(w, x, y)[0]


def what_is_sent(step, *shapes):
    return jc.inspect(step, *shapes).count
