"""Blocks of 8-bit multiples of a scale, rounded to nearest.

The scale is a 127th of the block's largest magnitude, rounded up to a bfloat16: a code times a
scale has no more bits than a float32, so that decoding does not round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._spmd.wire_formats import blocks as shared


def encode(blocks: jax.Array, feedback: bool) -> jax.Array:
    """Blocks of float32, of shape (..., m, block), as bytes of shape (..., m, block + 2)."""
    bits = shared.largest(blocks)
    scales = shared.scale(bits, lax.bitcast_convert_type(bits, jnp.float32) / np.float32(127))
    steps = shared.quotient(np.float32(1), scales)[..., None]
    return shared.joined(shared.rounded(blocks * steps, 0xFF).astype(jnp.uint8), scales)


def decode(codes: jax.Array, feedback: bool) -> jax.Array:
    """Blocks of float32 from what `encode` gave."""
    numbers, scales = shared.parted(codes)
    values = lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.float32)
    return values * shared.widened(scales)[..., None]
