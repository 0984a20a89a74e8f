"""The order in which gradients become ready, read from backward passes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcoll._gradients.proof.retrace import places, trace, trace_call

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


def order(loss, params, x=X):
    program = trace(jax.grad(loss), params, x)
    ranks = program.result(places(program.program))
    return sorted(ranks, key=lambda name: ranks[name])


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (plain, jnp.bfloat16),
        (jax.jit(plain), jnp.bfloat16),
        (rematerialized, jnp.bfloat16),
        (cast_first, jnp.float32),
    ],
    ids=["plain", "jitted", "rematerialized", "cast-first"],
)
def test_last_layer_is_ready_first(loss, dtype):
    params = {name: w.astype(dtype) for name, w in PARAMS.items()}
    assert order(loss, params) == ["w2", "w1", "w0"]


def test_loop_results_are_ready_together():
    def loss(params, x):
        stacked = jnp.stack([params["w1"], params["w2"]])
        x = layer(params["w0"], x)
        x, _ = lax.scan(lambda c, w: (layer(w, c), None), x, stacked)
        return jnp.sum(x.astype(jnp.float32))

    program = trace(jax.grad(loss), PARAMS, X)
    ranks = program.result(places(program.program))
    assert max(ranks["w1"], ranks["w2"]) < ranks["w0"]


def test_traced_programs_keep_results():
    calls = []

    def fun(x):
        calls.append(x)
        return {"sum": jnp.sum(x), "name": "text", "none": None, "number": 3}

    def both(x):
        program = trace_call(fun, x)
        return program.result(program.outputs(x)), program

    result, _ = both(X)
    assert (result["name"], result["none"], result["number"]) == ("text", None, 3)
    assert len(calls) == 1
    assert float(jax.jit(lambda x: both(x)[0]["sum"])(X)) == X.size
