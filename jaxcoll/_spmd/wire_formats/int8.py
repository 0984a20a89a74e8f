"""Blocks of 8-bit multiples of a scale, rounded to nearest.

The scale is a 127th of the block's largest magnitude, rounded up to a bfloat16: a code times a
scale has no more bits than a float32, so that decoding does not round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._spmd.wire_formats.blocks import (
    joined,
    largest,
    parted,
    reciprocal,
    rounded,
    scale,
    widened,
)


def encode(values: jax.Array, block: int) -> jax.Array:
    """Rows of float32, of shape (..., k) with k a multiple of `block`, as rows of bytes."""
    blocks = values.reshape(*values.shape[:-1], -1, block)
    scales = scale(largest(blocks), np.float32(127))
    codes = rounded(blocks * reciprocal(scales)[..., None], 0xFF).astype(jnp.uint8)
    return joined(codes.reshape(values.shape), scales)


def decode(codes: jax.Array, block: int) -> jax.Array:
    """Rows of float32 from what `encode` gave."""
    blocks, scales = parted(codes, block)
    numbers = lax.bitcast_convert_type(blocks, jnp.int8).astype(jnp.float32)
    return (numbers * widened(scales)[..., None]).reshape(*codes.shape[:-1], -1)
