"""The train step of a 12-layer transformer: a large program to inspect from shapes alone.

    cd docs/examples && jaxcoll inspect transformer:example --topology h100:8

`stacks.py` has more steps with the same layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxcoll as jc

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 12, 1024, 16, 512, 32000, 64


def example() -> tuple[Any, tuple[Any, ...]]:
    """Return the step and its argument shapes: 184 million bfloat16 parameters, 64 x 512 tokens."""
    embedding = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.bfloat16)
    params = {"embedding": embedding, "layers": [layer(WIDTH, jnp.bfloat16)] * LAYERS}
    return jc.data_parallel(step), (params, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))


def step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """Take one step of gradient descent."""
    value, grads = jc.value_and_grad(_loss, "data")(params, tokens)
    return jax.tree.map(lambda p, g: p - jnp.bfloat16(1e-3) * g, params, grads), value


def layer(width: int, dtype: Any, *stacked: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parameter shapes of one layer, or of `stacked` layers: 12 · width² each."""
    shapes = {
        "qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width),
        "down": (4 * width, width), "norm1": (width,), "norm2": (width,),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct((*stacked, *shape), dtype) for name, shape in shapes.items()}


def through(layer: Any, x: jax.Array) -> jax.Array:
    """Apply one layer in bfloat16, whatever the parameters' dtype.

    Args:
      layer: parameters with the shapes that `layer` returns.
      x: bfloat16 array of shape (texts, tokens, width).
    """
    layer = jax.tree.map(lambda p: p.astype(jnp.bfloat16), layer)
    x = x + _attention(layer, _norm(x, layer["norm1"]))
    return x + jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


def _loss(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    for each in params["layers"]:
        x = through(each, x)
    logits = jax.nn.log_softmax((x @ params["embedding"].T).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1))


def _attention(layer: Any, x: jax.Array) -> jax.Array:
    texts, tokens, width = x.shape
    one = width // HEADS
    q, k, v = (a.reshape(texts, tokens, HEADS, one) for a in jnp.split(x @ layer["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.bfloat16(one**-0.5)
    past = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(past, scores, jnp.bfloat16(-1e4)), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(x * x, -1, keepdims=True) + jnp.bfloat16(1e-5)
    return x * jax.lax.rsqrt(square) * scale[None, None]
