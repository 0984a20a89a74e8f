"""Parts that formats with blocks share: the largest magnitude of a block, its scale, rounding."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INFINITE = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC0)
_LARGEST = np.uint32(0x7F7E0000)
"""The bits of 127·2^121, of which a 127th has a bfloat16 above it that 127 times is finite."""

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
    # Halves are compared side by side; XLA's CPU compiler takes a reduction number by number. It
    # makes a second kernel of more than three halvings, and is slower at fewer than 32 numbers.
    while bits.shape[-1] > 32 and bits.shape[-1] % 2 == 0:
        bits = jnp.maximum(*jnp.split(bits, 2, axis=-1))
    return bits.max(-1)


def finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return whether all floats, real or complex, among these arrays are finite."""
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, np.inexact) and x.size]
    return functools.reduce(jnp.logical_and, map(_all_finite, floats), jnp.array(True))


def _all_finite(array: jax.Array) -> jax.Array:
    if array.dtype.itemsize > 4:
        return jnp.isfinite(array).all()
    flat = array.astype(jnp.float32).reshape(-1)
    rows = jnp.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    return (largest(rows) < INFINITE).all()


def scale(bits: jax.Array, wanted: jax.Array) -> jax.Array:
    """For each block, by its largest magnitude, the bits of a bfloat16: `wanted` or the next above.

    0 for a block of zeros; NaN for one with anything that is not finite, or above 127·2^121.
    """
    magnitude = lax.bitcast_convert_type(bits, jnp.float32)
    up = (lax.bitcast_convert_type(wanted, jnp.uint32) + np.uint32(0xFFFF)) >> 16
    up = jnp.where(magnitude < _LOST, np.uint32(0), up)
    return jnp.where(bits > _LARGEST, _NAN, up)


def widened(bits: jax.Array) -> jax.Array:
    """The float32 of a bfloat16's bits."""
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def quotient(one: jax.Array | np.float32, bits: jax.Array) -> jax.Array:
    """`one` / scale; 0 where the scale is 0 or NaN.

    The division comes last, so that compilers keep its result: they would compute anything cheaper
    again for each element of the block.
    """
    scales = widened(bits)
    return one / jnp.where(scales > 0, scales, np.float32(np.inf))


def rounded(values: jax.Array, mask: int) -> jax.Array:
    """The nearest integers, as the lowest bits of a uint32; of what is not finite any bits."""
    return lax.bitcast_convert_type(values + _ROUNDS, jnp.uint32) & np.uint32(mask)


def joined(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The bytes of each block's codes, and behind them the two of its scale."""
    both = jnp.stack([scales & np.uint32(0xFF), scales >> 8], axis=-1)
    return jnp.concatenate([codes, both.astype(jnp.uint8)], axis=-1)


def parted(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undo `joined`: return the blocks' codes, and the bits of their scales."""
    places = jnp.array([0, 8], jnp.uint32).reshape(*(1 for _ in codes.shape[:-1]), 2)
    both = codes[..., -2:].astype(jnp.uint32) << places
    return codes[..., :-2], both.sum(-1, dtype=jnp.uint32)  # compilers keep the result of a sum
