"""bfloat16 as 16-bit integers, which no backend widens on the wire."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._spmd.wire_formats.blocks import INFINITE, widened


def encode(blocks: jax.Array, feedback: bool) -> jax.Array:
    """float32 as uint16, each rounded to nearest even.

    In integers: XLA's CPU compiler stores what it converts, and copies that for each receiver.
    """
    bits = lax.bitcast_convert_type(blocks, jnp.uint32)
    up = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    is_nan = bits & np.uint32(0x7FFFFFFF) > INFINITE
    return (jnp.where(is_nan, bits | np.uint32(0x400000), up) >> 16).astype(jnp.uint16)


def decode(codes: jax.Array, feedback: bool) -> jax.Array:
    """float32 from what `encode` gave."""
    return widened(codes.astype(jnp.uint32))
