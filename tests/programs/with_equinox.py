"""Training with equinox as its guides write it, and the same over replicas."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from programs.data import SEQUENCES, Y, losses

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


def recurrent():
    @eqx.filter_jit
    def step(module, state, batch):
        value, grads = eqx.filter_value_and_grad(cross_entropy)(module, *batch)
        updates, state = TX.update(grads, state, module)
        return eqx.apply_updates(module, updates), state, value

    module = Recurrent(jax.random.key(0))
    state = TX.init(module)
    return losses(step, module, state, batch=[(SEQUENCES, Y)])
