"""The order in which gradients become ready, read from backward passes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcoll._gradients.proof.retrace import places, trace

WIDTH, LAYERS = 4, 3
PARAMS = {f"w{i}": jnp.ones((WIDTH, WIDTH), jnp.bfloat16) for i in range(LAYERS)}
X = jnp.ones((2, WIDTH), jnp.bfloat16)


def layer(w, x):
    return jnp.tanh(x @ w)


def plain(params, x):
    for i in range(LAYERS):
        x = layer(params[f"w{i}"], x)
    return jnp.sum(x.astype(jnp.float32))


def rematerialized(params, x):
    for i in range(LAYERS):
        x = jax.checkpoint(layer)(params[f"w{i}"], x)
    return jnp.sum(x.astype(jnp.float32))


def cast_first(params, x):
    # The casts of all gradients then stand at the end of the backward pass, first layer first.
    params = {k: v.astype(jnp.bfloat16) for k, v in sorted(params.items(), reverse=True)}
    return plain(params, x)


def in_a_loop(params, x):
    stacked = jnp.stack([params["w1"], params["w2"]])
    x, _ = lax.scan(lambda c, w: (layer(w, c), None), layer(params["w0"], x), stacked)
    return jnp.sum(x.astype(jnp.float32))


@pytest.mark.parametrize("loss", [plain, jax.jit(plain), rematerialized, cast_first, in_a_loop])
def test_last_layer_is_ready_first(loss):
    """The results of a loop are ready together."""
    params = {k: w.astype("f") for k, w in PARAMS.items()} if loss is cast_first else PARAMS
    program = trace(jax.grad(loss), params, X)
    ranks = program.result(places(program.program))
    first, then = ({"w2"}, {"w1"}) if loss is not in_a_loop else ({"w1", "w2"}, set())
    assert [{k for k in ranks if ranks[k] == r} for r in sorted(set(ranks.values()))] == [
        *filter(None, (first, then)), {"w0"}
    ]  # fmt: skip
