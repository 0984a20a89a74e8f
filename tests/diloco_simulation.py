"""Local updates as one process computes them, by vmap; and a small training to compare with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll as jc

_RANDOM = np.random.default_rng(0)
PARAMS = {
    "a": _RANDOM.standard_normal((32, 2)).astype("f") / 2,
    "b": _RANDOM.standard_normal((4, 32)).astype("f") / 2,
    "c": _RANDOM.standard_normal((12,)).astype("f") / 2,
}


def rows(step, n, each=4):
    """The batch of all replicas at one step."""
    return np.random.default_rng(step + 1).standard_normal((n * each, 4)).astype("f")


def loss(p, x):
    hidden = jnp.tanh(x @ p["b"])
    return jnp.mean((hidden @ p["a"] - x[:, :2] ** 2) ** 2) + jnp.mean(p["c"] ** 2) * x.mean()


def local_step(tx):
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state, value

    return step


@functools.cache
def _step(tx):
    return jax.jit(jax.vmap(local_step(tx)))


@functools.partial(jax.jit, static_argnums=0)
def _updated(outer, mean, state, shared):
    updates, state = outer.update(mean, state, shared)
    return jax.tree.map(jnp.add, shared, updates), state


def simulated(tx, n, steps, every, outer, options=None):
    """Shared parameters, every replica's parameters and losses after `steps`, by one process."""
    own, state = jax.tree.map(lambda x: np.stack([x] * n), (PARAMS, tx.init(PARAMS)))
    shared, of, losses = PARAMS, outer.init(PARAMS), []
    for t in range(1, steps + 1):
        own, state, value = _step(tx)(own, state, rows(t, n).reshape(n, 4, 4))
        losses.append(value)
        if t % every == 0:
            shared, of = _updated(outer, _mean(options, shared, own), of, shared)
            own = jax.tree.map(lambda x: np.stack([x] * n), shared)
    return shared, own, np.asarray(losses)


@functools.partial(jax.jit, static_argnums=0)
def _mean(options, shared, own):
    rows = {a: shared[a][None] - own[a] for a in shared}
    if options is None:
        return jax.tree.map(lambda x: jnp.mean(x, 0), rows)
    reduce = functools.partial(jc.all_reduce, "mean", axis_name="data", options=options)
    return jax.tree.map(lambda x: x[0], jax.vmap(reduce, axis_name="data")(rows))
