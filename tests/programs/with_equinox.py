"""Training with equinox as its guides write it, and the same over replicas."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from programs.data import BATCH, SEQUENCES, Y, losses

import jaxcoll as jc

TX = optax.adam(1e-2)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(2, 8, key=key)
        self.out = eqx.nn.Linear(8, 3, key=key)

    def __call__(self, xs):
        start = jnp.zeros(self.cell.hidden_size)
        return self.out(jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, xs)[0])


def cross_entropy(module, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(module)(x), y).mean()


def filtered_plain():
    @eqx.filter_jit
    def step(module, state, x, y):
        value, grads = eqx.filter_value_and_grad(cross_entropy)(module, x, y)
        updates, state = TX.update(grads, state, module)
        return eqx.apply_updates(module, updates), state, value

    module = eqx.nn.MLP(6, 3, 16, 1, key=jax.random.key(0))
    state = TX.init(eqx.filter(module, eqx.is_inexact_array))
    return losses(step, module, state, batch=BATCH)


def filtered_parallel():
    @jc.data_parallel(batch_argnums=("x", "y"))
    def step(params, state, x, y):
        def loss(params):
            return cross_entropy(eqx.combine(params, static), x, y)

        value, grads = jc.value_and_grad(loss)(params)
        updates, state = TX.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    module = eqx.nn.MLP(6, 3, 16, 1, key=jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_inexact_array)
    state = TX.init(params)
    return losses(step, params, state, batch=BATCH)


def recurrent():
    @eqx.filter_jit
    def step(module, state, batch):
        value, grads = eqx.filter_value_and_grad(cross_entropy)(module, *batch)
        updates, state = TX.update(grads, state, module)
        return eqx.apply_updates(module, updates), state, value

    module = Recurrent(jax.random.key(0))
    state = TX.init(module)
    return losses(step, module, state, batch=[(SEQUENCES, Y)])
