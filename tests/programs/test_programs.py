"""Programs of other libraries' users, with two words changed: equal losses over replicas.

Each is written as the guide of its library writes it. docs/libraries.md has more.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("types_may_mix")

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((32, 6)).astype("f"), RNG.integers(0, 3, 32)
SEQUENCES = RNG.standard_normal((32, 5, 2)).astype("f")
ADAM = optax.adam(1e-2)


def cross_entropy(scores, labels):
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def losses(step, *carry, x=X):
    """Those of some steps, each of which returns what the next one takes, and its loss."""
    values = []
    for _ in range(3):
        *carry, value = step(*carry, (x, Y))
        values.append(float(value))
    return values


def train_state(jit, value_and_grad, axis):
    net = nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(3)])

    @jit
    def step(state, batch):
        def loss(params):
            return cross_entropy(state.apply_fn(params, batch[0]), batch[1])

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    params = net.init(jax.random.key(0), X)
    return losses(step, TrainState.create(apply_fn=net.apply, params=params, tx=ADAM))


def batch_norm(jit, value_and_grad, axis):
    norm = lambda axis: nn.BatchNorm(use_running_average=False, axis_name=axis)
    net, whole = (nn.Sequential([nn.Dense(16), norm(a), nn.Dense(3)]) for a in (axis, None))

    @jit
    def step(variables, state, batch):
        def loss(params):
            given = {"params": params, "batch_stats": variables["batch_stats"]}
            scores, new = net.apply(given, batch[0], mutable=["batch_stats"])
            return cross_entropy(scores, batch[1]), new

        (value, new), grads = value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = ADAM.update(grads, state)
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, **new}, state, value

    variables = whole.init(jax.random.key(0), X)
    return losses(step, variables, ADAM.init(variables["params"]))


def nnx_objects(jit, value_and_grad, axis):
    """Changed in place, and returned."""
    layers = nnx.Linear(6, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 3, rngs=nnx.Rngs(1))
    module = nnx.Sequential(*layers)

    @(jit if axis else nnx.jit)
    def step(module, optimizer, batch):
        loss = lambda module: cross_entropy(module(batch[0]), batch[1])
        value, grads = nnx.value_and_grad(loss)(module)
        if axis:
            value, grads = jc.pmean((value, grads))
        optimizer.update(module, grads)
        return module, optimizer, value

    return losses(step, module, nnx.Optimizer(module, ADAM, wrt=nnx.Param))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __call__(self, xs):
        start = jnp.zeros(self.cell.hidden_size)
        return self.out(jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, xs)[0])


def equinox(jit, value_and_grad, axis):
    def loss(module, x, y):
        return cross_entropy(jax.vmap(module)(x), y)

    @(jit if axis else eqx.filter_jit)
    def step(module, state, batch):
        grad = value_and_grad if axis else eqx.filter_value_and_grad
        value, grads = grad(loss)(module, *batch)
        updates, state = ADAM.update(grads, state, module)
        return eqx.apply_updates(module, updates), state, value

    key = jax.random.key(0)
    module = Recurrent(eqx.nn.GRUCell(2, 8, key=key), eqx.nn.Linear(8, 3, key=key))
    return losses(step, module, ADAM.init(module), x=SEQUENCES)


@pytest.mark.parametrize("program", [train_state, batch_norm, nnx_objects, equinox])
def test_replicas_repeat_one_devices_losses(program):
    want = program(jax.jit, jax.value_and_grad, None)
    assert len(set(want)) > 1
    step = jc.data_parallel(batch_argnums="batch")
    np.testing.assert_allclose(program(step, jc.value_and_grad, "data"), want, rtol=2e-5)
