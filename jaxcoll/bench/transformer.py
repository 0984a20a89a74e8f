"""A train step of a 12-layer transformer, by its shapes: something large to look into.

jaxcoll inspect jaxcoll.bench.transformer:example --topology h100:8
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll._host.data_parallel import data_parallel
from jaxcoll._host.in_program import value_and_grad

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 12, 1024, 16, 512, 32000, 64


def example() -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments: 184 million parameters in bfloat16, 64 texts of 512 tokens."""
    layer = {
        "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,),
    }  # fmt: skip
    shapes = {"embedding": (VOCABULARY, WIDTH), "layers": [layer] * LAYERS}
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )
    return data_parallel(step), (params, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))


def step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """Gradient descent."""
    value, grads = value_and_grad(_loss, "data")(params, tokens)
    return jax.tree.map(lambda p, g: p - jnp.bfloat16(1e-3) * g, params, grads), value


def _loss(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = x + _attention(layer, _norm(x, layer["norm1"]))
        x = x + jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax((x @ params["embedding"].T).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1))


def _attention(layer: Any, x: jax.Array) -> jax.Array:
    heads = (x.shape[0], LENGTH, HEADS, WIDTH // HEADS)
    q, k, v = (a.reshape(heads) for a in jnp.split(x @ layer["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.bfloat16((WIDTH // HEADS) ** -0.5)
    past = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(past, scores, jnp.bfloat16(-1e4)), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(x * x, -1, keepdims=True) + jnp.bfloat16(1e-5)
    return x * jax.lax.rsqrt(square) * scale[None, None]
