"""A small convolutional network in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, dict[str, Any]]

_SHAPES = {"conv1": (9, 16), "conv2": (9 * 16, 32), "hidden": (4 * 4 * 32, 64), "scores": (64, 10)}
_GAIN = 1.6  # keeps the size of activations from layer to layer; gelu would shrink them


def initial(seed: int) -> Params:
    """New parameters, float32, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    return {
        layer: {
            "bias": np.zeros(width, np.float32),
            "kernel": (rng.standard_normal((fan_in, width)) * (_GAIN / np.sqrt(fan_in))).astype(
                np.float32
            ),
        }
        for layer, (fan_in, width) in _SHAPES.items()
    }


def scores(params: Params, images: jax.Array) -> jax.Array:
    """Logits of shape (n, 10) for images of shape (n, 8, 8)."""
    x = images[..., None]
    x = jax.nn.gelu(_dense(_neighbourhoods(x), params["conv1"]))
    x = jax.nn.gelu(_dense(_neighbourhoods(x)[:, ::2, ::2], params["conv2"]))
    x = jax.nn.gelu(_dense(x.reshape(x.shape[0], -1), params["hidden"]))
    return _dense(x, params["scores"])


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of the images given: all of them, or one replica's share."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels))


def accuracy(params: Params, images: np.ndarray, labels: np.ndarray) -> float:
    """The part of the images whose highest score is the right one."""
    found = np.argmax(np.asarray(jax.jit(scores)(params, images)), axis=1)
    return float(np.mean(found == labels))


def _dense(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _neighbourhoods(x: jax.Array) -> jax.Array:
    """Each pixel's 3 × 3 neighbourhood in one row: a convolution is a matrix product of these."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate(
        [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1
    )
