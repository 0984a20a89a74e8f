"""What formats with blocks share: the largest magnitude of a block, its scale, rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INFINITE = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC0)
_LOST = np.float32(1e-34)
"""Blocks of nothing larger are zero: XLA flushes subnormals, and 1 / subnormal is infinite."""

_ROUNDS = np.float32(3 << 22)
"""Added to a float32 of less than 2^22, it leaves no bits behind the point: the sum is rounded to
nearest even, and an integer stands in its lowest bits. Conversions would be clamped first."""


def largest(blocks: jax.Array) -> jax.Array:
    """The bits of the largest magnitude along the last axis; NaN is above infinity.

    A maximum of integers: XLA's CPU compiler drops NaN from maxima of floats (openxla/xla#21461).
    """
    bits = lax.bitcast_convert_type(blocks, jnp.uint32) & np.uint32(0x7FFFFFFF)
    # Halves are compared side by side; XLA's CPU compiler takes a reduction number by number.
    while bits.shape[-1] > 8 and bits.shape[-1] % 2 == 0:
        bits = jnp.maximum(*jnp.split(bits, 2, axis=-1))
    return bits.max(-1)


def scale(bits: jax.Array, top: jax.Array | np.float32) -> jax.Array:
    """For each block the bits of a bfloat16 that its largest magnitude is at most `top` times.

    0 for a block of zeros; NaN for one with anything that is not finite.
    """
    magnitude = lax.bitcast_convert_type(bits, jnp.float32)
    up = (lax.bitcast_convert_type(magnitude / top, jnp.uint32) + np.uint32(0xFFFF)) >> 16
    up = jnp.where(magnitude < _LOST, np.uint32(0), up)
    return jnp.where(bits >= INFINITE, _NAN, up)


def widened(bits: jax.Array) -> jax.Array:
    """The float32 of a bfloat16's bits."""
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def reciprocal(bits: jax.Array) -> jax.Array:
    """1 / scale; 0 where the scale is 0 or NaN."""
    scales = widened(bits)
    return jnp.where(scales > 0, np.float32(1) / scales, np.float32(0))


def rounded(values: jax.Array, mask: int) -> jax.Array:
    """The nearest integers, as the lowest bits of a uint32; of what is not finite any bits."""
    return lax.bitcast_convert_type(values + _ROUNDS, jnp.uint32) & np.uint32(mask)


def joined(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Codes of one byte, and behind those of each row the two bytes of its blocks' scales."""
    both = jnp.stack([scales & np.uint32(0xFF), scales >> 8], axis=-1).astype(jnp.uint8)
    return jnp.concatenate([codes, both.reshape(*scales.shape[:-1], -1)], axis=-1)


def parted(codes: jax.Array, block_bytes: int) -> tuple[jax.Array, jax.Array]:
    """What `joined` joined: codes by blocks, and the bits of the scales."""
    blocks = codes.shape[-1] // (block_bytes + 2)
    size = blocks * block_bytes
    low, high = jnp.moveaxis(
        codes[..., size:].reshape(*codes.shape[:-1], blocks, 2).astype(jnp.uint32), -1, 0
    )
    return codes[..., :size].reshape(*codes.shape[:-1], blocks, block_bytes), low | high << 8
