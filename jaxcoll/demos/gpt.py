"""A small GPT in plain JAX, which scans over its layers: one stack of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]

LAYERS, WIDTH, HEADS, LENGTH = 4, 64, 4, 64
VOCABULARY = 256  # a token is a byte


def initial(seed: int) -> Params:
    """New parameters, float32, the same ones for the same seed.

    Matrices are normal with deviation 1/sqrt(fan in), those that add to the stream smaller by
    sqrt(2 · layers).
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float) -> np.ndarray:
        return (rng.standard_normal(shape) * deviation).astype(np.float32)

    def layers(fan_in: int, fan_out: int, scale: float = 1.0) -> np.ndarray:
        return normal(LAYERS, fan_in, fan_out, deviation=scale / math.sqrt(fan_in))

    adds = 1 / math.sqrt(2 * LAYERS)
    return {
        "embedding": normal(VOCABULARY, WIDTH, deviation=0.02),
        "positions": normal(LENGTH, WIDTH, deviation=0.02),
        "layers": {
            "norm1": np.ones((LAYERS, WIDTH), np.float32),
            "qkv": layers(WIDTH, 3 * WIDTH),
            "out": layers(WIDTH, WIDTH, adds),
            "norm2": np.ones((LAYERS, WIDTH), np.float32),
            "up": layers(WIDTH, 4 * WIDTH),
            "down": layers(4 * WIDTH, WIDTH, adds),
        },
        "norm": np.ones(WIDTH, np.float32),
    }


def loss(
    params: Params, tokens: jax.Array, of_layer: Callable[[Params], Params] = lambda layer: layer
) -> jax.Array:
    """Mean cross-entropy of each next byte, over the texts given: all of them, or a share.

    Args:
      params: of `initial`.
      tokens: int32 of shape (texts, LENGTH + 1).
      of_layer: what is done with each layer's parameters before they are used.

    Returns:
      A scalar, in nats.
    """
    x = params["embedding"][tokens[:, :-1]] + params["positions"]

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        weights = of_layer(weights)
        x = x + _attention(weights, _norm(x, weights["norm1"]))
        hidden = jax.nn.gelu(_norm(x, weights["norm2"]) @ weights["up"])
        return x + hidden @ weights["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = _norm(x, params["norm"]) @ params["embedding"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def _attention(weights: Params, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (a.reshape(heads) for a in jnp.split(x @ weights["qkv"], 3, -1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
