"""Training with haiku and optax as their guides write it, and the same over replicas."""

import chex
import haiku as hk
import jax
import optax
from programs.data import BATCH, STEPS, X, losses

import jaxcoll as jc

NET = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 3])(x)))
FOUR = optax.MultiSteps(optax.sgd(0.1), 4)


def loss(params, batch):
    scores = NET.apply(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()


def accumulated_plain():
    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = FOUR.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = NET.init(jax.random.key(0), X)
    state = FOUR.init(params)
    found = []
    for _ in range(STEPS):
        values = []
        for k in range(4):  # rows k, k + 4, ...: one microbatch
            params, state, value = step(params, state, jax.tree.map(lambda x, k=k: x[k::4], BATCH))
            values.append(value)
        found.append(sum(values) / 4)
    return found


def accumulated_parallel():
    @jc.data_parallel(batch_argnums="batch")
    def step(params, state, batch):
        value, grads = jc.accumulate(loss, num_microbatches=4)(params, batch)
        updates, state = FOUR.inner_opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = NET.init(jax.random.key(0), X)
    state = FOUR.inner_opt.init(params)
    found = []
    for _ in range(STEPS):
        params, state, value = step(params, state, BATCH)
        found.append(value)
    return found


def lookahead():
    @chex.dataclass
    class State:
        params: optax.LookaheadParams
        opt: optax.OptState

    tx = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)

    @jax.jit
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params.fast, batch)
        updates, opt = tx.update(grads, state.opt, state.params)
        return State(params=optax.apply_updates(state.params, updates), opt=opt), value

    params = optax.LookaheadParams.init_synced(NET.init(jax.random.key(0), X))
    state = State(params=params, opt=tx.init(params))
    return losses(step, state)
