"""Leaves that replicas must hold alike, because their gradients are reduced, and that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import P, mapped

import jaxcoll as jc
from jaxcoll import _compat

ROW = P("data")
X = np.random.default_rng(3).standard_normal((32, 3)).astype("f")
PARAMS = {"expert": np.ones((12, 5), "f"), "shared": np.ones((3, 5), "f")}
SPECS = {"expert": ROW, "shared": P()}


def squares(params, x):
    w = params["expert"] + params["shared"]
    return jnp.mean(jnp.sin(x @ w) ** 2)


CALLS = {
    "jc.grad": lambda p, x: jc.grad(squares, "data")(p, x),
    "jc.value_and_grad": lambda p, x: jc.value_and_grad(squares, "data", scatter=True)(p, x),
    "jc.accumulate": lambda p, x: jc.accumulate(squares, "data", 2)(p, x),
    "sync_in_backward": lambda p, x: squares(jc.sync_in_backward(p, "data"), x),
}


@pytest.mark.parametrize("caller", CALLS)
def test_differing_leaves_are_refused(caller):
    """By its type in a checked `shard_map`; by the proof in a step: test_gradients_that_differ.py."""
    message = (
        rf"`{caller}` over 'data': leaf .*\['expert'\] must be the same .* differs between them"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped(CALLS[caller], (SPECS, ROW)), PARAMS, X)


def test_inner_training_steps_are_taken():
    """There every parameter is typed as varying, whether it differs or not."""
    params = jnp.ones((3, 5))

    def inner(w, x):
        loss = lambda w, x: jnp.mean(jnp.sin(x @ w) ** 2)
        return loss(w - jc.grad(loss, "data")(w, x), x)

    def alone(w):
        loss = lambda w: jnp.mean(jnp.sin(X @ w) ** 2)
        return loss(w - jax.grad(loss)(w))

    want = jax.jit(jax.grad(alone))(params)
    f = jc.grad(inner, "data")
    for program in (mapped(f, (P(), ROW)), jc.data_parallel(f)):
        np.testing.assert_allclose(program(params, X), want, rtol=1e-4, atol=1e-6)


def test_experts_keep_their_gradient():
    """Beside the reduced one of what replicas share; the batch's is each replica's, too."""

    def step(shared, experts, x):
        loss = lambda shared, expert: squares({"shared": shared, "expert": expert}, x)
        return jc.grad(loss)(shared, experts), jax.grad(loss, 1)(shared, experts)

    experts = np.arange(12 * 5, dtype="f").reshape(12, 5)
    program = jc.data_parallel(
        step, batch_argnums=(1, 2), varying_outputs=("error", "concatenate"), mesh=jax.make_mesh(
            (4,), ("data",), devices=jax.devices()[:4]
        ),
    )  # fmt: skip
    got = program(PARAMS["shared"], experts, X)

    def whole(shared, experts):
        losses = [
            squares({"shared": shared, "expert": experts[3 * i : 3 * i + 3]}, X[8 * i : 8 * i + 8])
            for i in range(4)
        ]
        return sum(losses) / 4

    of_shared, of_experts = jax.jit(jax.grad(whole, argnums=(0, 1)))(PARAMS["shared"], experts)
    np.testing.assert_allclose(got[0], of_shared, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got[1], 4 * of_experts, rtol=1e-4, atol=1e-6)


ALIKE = {"expert": jnp.ones(3), "shared": jnp.ones(3)}
SGD = optax.sgd(0.1, momentum=0.9)


def optimizers(axis):
    """What takes parameters, or reduced gradients, that all replicas hold alike."""
    sharded = jc.sharded_optimizer(SGD, axis)
    link = jc.all_reduce_updates(axis)
    own = lambda: jax.tree.map(lambda x: _compat.cast_varying(x, [axis]), ALIKE)
    return {
        "sharded, init": sharded.init,
        "sharded, params": lambda params: sharded.update(own(), sharded.init(ALIKE), params)[0],
        "sharded, reduced": lambda grads: sharded.update(
            grads, sharded.init(ALIKE), ALIKE, reduced=True
        )[0],
        "updates": lambda params: link.update(own(), None, params)[0],
    }


@pytest.mark.parametrize("name", optimizers("data"))
def test_optimizers_refuse_differing_leaves(name):
    def step(params):
        optimizer = optimizers("data")[name]
        return jnp.stack([jnp.sum(x) for x in jax.tree.leaves(optimizer(params))])[None]

    params = {"expert": np.ones(12, "f"), "shared": np.ones(3, "f")}
    message = r"leaf \['expert'\] must be the same .* differs between them"
    with pytest.raises(ValueError, match=message + " by its type"):
        jax.eval_shape(mapped(step, (SPECS,), ROW), params)
    jax.eval_shape(mapped(step, (P(),), ROW), ALIKE)

    strategy = jc.MirroredStrategy(jax.devices()[:4])
    own = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(3))
    with pytest.raises(ValueError, match=message + ", or jaxcoll"):
        strategy.run(optimizers("replica")[name], ({**ALIKE, "expert": own},))
