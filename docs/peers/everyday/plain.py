"""Everyday tasks with JAX and optax alone: `jit` with shardings, and `shard_map` where needed."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import CLIP, RATE

MESH = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
ROWS, COPIES = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def train_step(w, x, y):
    @jax.jit
    def step(w, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        return w - RATE * grads, value

    return step(jax.device_put(w, COPIES), *jax.device_put((x, y), ROWS))[0]


def accumulate(w, x, y):
    @jax.jit
    @partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(w, x, y):
        mine = jax.lax.pcast(w, "data", to="varying")
        parts = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (x, y))

        def add(total, part):
            return total + jax.grad(loss)(mine, *part) / 4, None

        total, _ = jax.lax.scan(add, jnp.zeros_like(mine), parts)
        return w - RATE * jax.lax.pmean(total, "data")

    return step(jax.device_put(w, COPIES), *jax.device_put((x, y), ROWS))


def clip(w, x, y):
    @jax.jit
    def step(w, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        return w - RATE * grads * jnp.minimum(1, CLIP / optax.tree.norm(grads)), value

    return step(jax.device_put(w, COPIES), *jax.device_put((x, y), ROWS))[0]


def uneven_rows(w, x, y, real):
    def weighted(w, x, y, real):
        return jnp.sum((x @ w - y) ** 2 * real) / jnp.sum(real)

    @jax.jit
    def step(w, x, y, real):
        value, grads = jax.value_and_grad(weighted)(w, x, y, real)
        return w - RATE * grads, value

    return step(jax.device_put(w, COPIES), *jax.device_put((x, y, real), ROWS))[0]


def sharded_optimizer(w, x, y):
    adam = optax.adam(RATE)
    w, (x, y) = jax.device_put(w, COPIES), jax.device_put((x, y), ROWS)
    layout = jax.tree.map(lambda a: ROWS if a.ndim else COPIES, jax.eval_shape(adam.init, w))
    state = jax.jit(adam.init, out_shardings=layout)(w)

    @partial(jax.jit, out_shardings=(COPIES, layout, COPIES))
    def step(w, state, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        updates, state = adam.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    return step(w, state, x, y)[0]


def sharded_parameters(w, x, y):
    @partial(jax.jit, out_shardings=(ROWS, COPIES))
    def step(w, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        return w - RATE * grads, value

    return step(*jax.device_put((w, x, y), ROWS))[0]


def tensor_parallel(w, x, y):
    @partial(jax.jit, out_shardings=(ROWS, COPIES))
    def step(w, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        return w - RATE * grads, value

    x = jax.device_put(x, NamedSharding(MESH, P(None, "data")))
    return step(jax.device_put(w, ROWS), x, jax.device_put(y, COPIES))[0]


def skip_not_finite(w, x, y):
    @jax.jit
    def step(w, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        return jnp.where(jnp.isfinite(grads).all(), w - RATE * grads, w), value

    return step(jax.device_put(w, COPIES), *jax.device_put((x, y), ROWS))[0]


def what_is_sent(step, *args):
    return step.lower(*args).compile().as_text().count(" all-reduce(")
