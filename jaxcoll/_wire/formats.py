"""The wire formats: bfloat16, and codes of 4 and 8 bits in blocks.

A scale is rounded up to a bfloat16, so that a code times a scale has no more bits than a float32:
decoding does not round.

The levels of 4 bits are those of least square error for Gaussian numbers divided by the largest
magnitude of their block of 64 (Lloyd, "Least squares quantization in PCM", 1982), rounded to
256ths. In other blocks the codes are multiples of the scale, whose sign says so: where the largest
magnitude is 7·2^k, which few numbers but integers have, and under error feedback. Fitted levels lie
far apart at the ends, so that feedback would owe more of the largest numbers, and train worse.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._wire import blocks as shared
from jaxcoll._wire.format import WireFormat


@dataclasses.dataclass(frozen=True)
class Bf16(WireFormat):
    """bfloat16: the upper half of a float32, rounded to nearest; an element takes 2 bytes.

    What bfloat16 can hold arrives exactly. Error of a sum, rounded twice: 0.0024 of the norm.

    Examples:
      >>> Bf16().nbytes(1000)
      2000
    """

    block: int = dataclasses.field(default=1, init=False, repr=False)

    name: ClassVar[str] = "bf16"
    scale_bytes: ClassVar[int] = 0
    least: ClassVar[int] = 64
    # float16 has more bits of mantissa, and is no longer.
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    passes: ClassVar[float] = 0.6

    def __post_init__(self) -> None:
        pass

    def encode(self, blocks: jax.Array, feedback: bool) -> jax.Array:
        """Return float32 as uint16, each rounded to nearest even.

        In integers: XLA's CPU compiler stores what it converts, and copies that for each receiver.
        """
        bits = lax.bitcast_convert_type(blocks, jnp.uint32)
        up = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        is_nan = bits & np.uint32(0x7FFFFFFF) > shared.INFINITE
        return (jnp.where(is_nan, bits | np.uint32(0x400000), up) >> 16).astype(jnp.uint16)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return float32 from what `encode` gave."""
        return shared.widened(codes.astype(jnp.uint32))


LEVELS = (-241, -186, -145, -111, -81, -53, -26, 0, 21, 43, 67, 92, 120, 154, 194, 245)
"""In 256ths, by code."""

_BELOW = (26.3636364, 0.0400091575, 0.0025183150)
_ABOVE = (21.3287493, 0.0882411859, 0.0008780716)
"""Odd polynomials that are within 0.42 of the levels below zero and above it, at -7 to -1 and 1 to
8. To round them takes half the time of looking levels up."""

_CURVE = (11.9386 / 256, -6.6751 / 256**3, 3.1613 / 256**5)
_SHORTER = np.float32(0.8236)
"""An odd polynomial that takes the middle between levels k and k + 1 to about k + 1/2; for negative
numbers, which have a level less, of so much of them. Fifteen comparisons would gain 0.2 %."""

_SEVEN = np.uint32(0x600000)
"""The mantissa of 7·2^k."""

_SEVENTH = np.float32(1 / 7)
"""The factor from 7·2^k to 2^k."""

_TWO = np.uint32(2 << 23)
"""Taken from a float32's bits, it is divided by 2^2."""


@dataclasses.dataclass(frozen=True)
class Int4(WireFormat):
    """One of 16 fitted levels of a scale for each block: an element takes 4 bits and 2/block byte.

    The levels are fitted to Gaussian numbers divided by the largest of their block. Under error
    feedback, and where a block's largest is 7·2^k, they are even: -7 to 7 times the scale.

    Zeros, and blocks of multiples of 2^k of which the largest is 7·2^k, arrive exactly. Error of a
    sum of Gaussian numbers, rounded twice whatever n is: 0.125 of the norm.

    Args:
      block: elements that share a scale; a multiple of 2.

    Examples:
      >>> Int4().nbytes(1024)
      544
    """

    block: int = 64

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    passes: ClassVar[float] = 2.2

    def encode(self, blocks: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks as bytes, of shape (..., m, block / 2 + 2)."""
        bits = shared.largest(blocks)
        # No divisions, which would be kernels of their own.
        if feedback:
            integers = jnp.ones_like(bits, bool)
            wanted = lax.bitcast_convert_type(bits, jnp.float32) * _SEVENTH
        else:
            integers = (bits & np.uint32(0x7FFFFF)) == _SEVEN
            exponents = jnp.where(integers, bits - _SEVEN, bits)
            exponents -= jnp.where(integers, _TWO, 4 * _TWO)
            wanted = lax.bitcast_convert_type(exponents, jnp.float32)  # 2^k, or a 256th
        scales = shared.scale(bits, wanted)
        steps = shared.quotient(jnp.where(integers, np.float32(-1), np.float32(1)), scales)[
            ..., None
        ]
        codes = blocks * abs(steps)
        codes = codes if feedback else jnp.where(steps < 0, codes, _curved(codes))
        codes = shared.rounded(codes + np.float32(7), 0xF)
        halves = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], 2, -1)
        places = jnp.array([0, 4], jnp.uint8).reshape(*(1 for _ in codes.shape[:-1]), 2, 1)
        # Compilers keep the result of a sum; of an "or" they would code anew for each receiver.
        packed = (halves << places).sum(-2, dtype=jnp.uint8)
        return shared.joined(packed, scales | integers.astype(jnp.uint32) << 15)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks of float32 from what `encode` gave."""
        packed, scales = shared.parted(codes)
        factors = shared.widened(scales & np.uint32(0x7FFF))[..., None]
        halves = [
            half.astype(jnp.float32) - np.float32(7)
            for half in (packed & np.uint8(0xF), packed >> np.uint8(4))
        ]
        if feedback:
            # They are within that. A loop of less LLVM would unroll, and not vectorise.
            halves = [jnp.clip(half, -7, 8) for half in halves]
        else:
            integers = (scales >> 15 == 1)[..., None]
            halves = [jnp.where(integers, half, _levels(half)) for half in halves]
        return jnp.concatenate([half * factors for half in halves], axis=-1)


def _levels(codes: jax.Array) -> jax.Array:
    """Return `LEVELS` of codes from -7 to 8, to the bit."""
    squares = codes * codes
    a, b, c = (
        jnp.where(codes < 0, *map(np.float32, pair)) for pair in zip(_BELOW, _ABOVE, strict=True)
    )
    fitted = codes * (a + squares * (b + squares * c))
    return lax.round(fitted, lax.RoundingMethod.TO_NEAREST_EVEN)


def _curved(values: jax.Array) -> jax.Array:
    a, b, c = map(np.float32, _CURVE)
    values = jnp.maximum(values, values * _SHORTER)
    squares = values * values
    return values * (a + squares * (b + squares * c))


@dataclasses.dataclass(frozen=True)
class Int8(WireFormat):
    """Multiples -127 to 127 of a scale for each block: an element takes 1 byte and 2/block.

    Zeros, and blocks of multiples of 2^k of which the largest is 127·2^k, arrive exactly. Error of
    a sum of Gaussian numbers, rounded twice whatever n is: 0.0099 of the norm.

    Args:
      block: elements that share a scale; a multiple of 2.

    Examples:
      >>> Int8().nbytes(1024)
      1032
    """

    block: int = 256

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def encode(self, blocks: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks as bytes, of shape (..., m, block + 2)."""
        bits = shared.largest(blocks)
        scales = shared.scale(bits, lax.bitcast_convert_type(bits, jnp.float32) / np.float32(127))
        steps = shared.quotient(np.float32(1), scales)[..., None]
        return shared.joined(shared.rounded(blocks * steps, 0xFF).astype(jnp.uint8), scales)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks of float32 from what `encode` gave."""
        numbers, scales = shared.parted(codes)
        values = lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.float32)
        return values * shared.widened(scales)[..., None]
