"""Blocks of 4-bit codes, two to a byte, each for one of sixteen levels of a scale.

The levels are those of least square error for Gaussian numbers divided by the largest magnitude of
their block of 64 (Lloyd, "Least squares quantization in PCM", 1982), rounded to 256ths: a level
times a bfloat16 scale has no more bits than a float32, so that decoding does not round. In a block
whose largest magnitude is 7·2^k, which few numbers but integers have, the codes are multiples of
2^k; the scale's sign says so.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._spmd.wire_formats.blocks import (
    joined,
    largest,
    parted,
    quotient,
    rounded,
    scale,
    widened,
)

_FITTED = (-241, -186, -145, -111, -81, -53, -26, 0, 21, 43, 67, 92, 120, 154, 194, 245)
_LEVELS = np.array([*_FITTED, *range(-7, 9)], np.float32)
"""By code, those of 256ths and then those of integers."""

_CURVE = (11.9386 / 256, -6.6751 / 256**3, 3.1613 / 256**5)
_SHORTER = np.float32(0.8236)
"""An odd polynomial that takes the middle between levels k and k + 1 to about k + 1/2; for negative
numbers, which have a level less, of so much of them. Fifteen comparisons would gain 0.2 %."""

_SEVEN = np.uint32(0x600000)
"""What the mantissa of 7·2^k is."""


def encode(blocks: jax.Array) -> jax.Array:
    """Blocks of float32, of shape (..., m, block), as bytes of shape (..., m, block / 2 + 2)."""
    bits = largest(blocks)
    integers = (bits & np.uint32(0x7FFFFF)) == _SEVEN
    scales = scale(bits, jnp.where(integers, np.float32(7), np.float32(256)))
    steps = quotient(jnp.where(integers, np.float32(-1), np.float32(1)), scales)[..., None]
    codes = blocks * abs(steps)
    codes = rounded(jnp.where(steps < 0, codes, _curved(codes)) + np.float32(7), 0xF)
    first, second = jnp.split(codes, 2, axis=-1)
    return joined(
        (first | second << 4).astype(jnp.uint8), scales | integers.astype(jnp.uint32) << 15
    )


def decode(codes: jax.Array) -> jax.Array:
    """Blocks of float32 from what `encode` gave."""
    packed, scales = parted(codes)
    integers = (scales >> 15 << 4).astype(jnp.uint8)[..., None]
    factors = widened(scales & np.uint32(0x7FFF))[..., None]
    levels = jnp.asarray(_LEVELS)
    halves = [
        levels.at[half | integers].get(mode="promise_in_bounds") * factors
        for half in (packed & np.uint8(0xF), packed >> np.uint8(4))
    ]
    return jnp.concatenate(halves, axis=-1)


def _curved(values: jax.Array) -> jax.Array:
    a, b, c = map(np.float32, _CURVE)
    values = jnp.maximum(values, values * _SHORTER)
    squares = values * values
    return values * (a + squares * (b + squares * c))
