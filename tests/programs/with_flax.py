"""Training with flax as its guides write it, and the same over replicas."""

import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.training.train_state import TrainState
from programs.data import BATCH, STEPS, X, losses

NET = nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(3)])
NORMED = nn.Sequential([nn.Dense(16), nn.BatchNorm(use_running_average=False), nn.Dense(3)])
SYNCED = nn.Sequential(
    [nn.Dense(16), nn.BatchNorm(use_running_average=False, axis_name="data"), nn.Dense(3)]
)


class Module(nnx.Module):
    def __init__(self):
        self.one = nnx.Linear(6, 16, rngs=nnx.Rngs(0))
        self.two = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.two(nnx.relu(self.one(x)))


def cross_entropy(scores, labels):
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def train_state():
    @jax.jit
    def step(state, batch):
        def loss(params):
            return cross_entropy(state.apply_fn(params, batch[0]), batch[1])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    params = NET.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=NET.apply, params=params, tx=optax.adam(1e-2))
    return losses(step, state)


def batch_norm():
    tx = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(variables, state, batch):
        def loss(params):
            given = {"params": params, "batch_stats": variables["batch_stats"]}
            scores, new = NORMED.apply(given, batch[0], mutable=["batch_stats"])
            return cross_entropy(scores, batch[1]), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, **new}, state, value

    variables = NORMED.init(jax.random.key(0), X)
    state = tx.init(variables["params"])
    return losses(step, variables, state)


def nnx_in_place():
    @nnx.jit
    def step(module, optimizer, batch):
        def loss(module):
            return cross_entropy(module(batch[0]), batch[1])

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    module = Module()
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    history = []
    for _ in range(STEPS):
        value = step(module, optimizer, BATCH)
        history.append(value)
    return history
