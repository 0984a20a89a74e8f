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
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._wire.format import WireFormat

_INFINITE = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC0)
_TOP = np.uint32(0x7F7E0000)
"""The bits of 127·2^121, of which a 127th has a bfloat16 above it that 127 times is finite."""

_LOST = np.float32(1e-34)
"""Blocks of nothing larger are zero: XLA flushes subnormals, and 1 / subnormal is infinite."""

_ROUNDS = np.float32(3 << 22)
"""Added to a float32 of less than 2^22, it leaves no bits behind the point: the sum is rounded to
nearest even, and an integer stands in its lowest bits. Conversions would be clamped first."""


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
        is_nan = bits & np.uint32(0x7FFFFFFF) > _INFINITE
        return (jnp.where(is_nan, bits | np.uint32(0x400000), up) >> 16).astype(jnp.uint16)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return float32 from what `encode` gave."""
        return _widened(codes.astype(jnp.uint32))


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
        bits = _largest(blocks)
        # No divisions, which would be kernels of their own.
        if feedback:
            integers = jnp.ones_like(bits, bool)
            wanted = lax.bitcast_convert_type(bits, jnp.float32) * _SEVENTH
        else:
            integers = (bits & np.uint32(0x7FFFFF)) == _SEVEN
            exponents = jnp.where(integers, bits - _SEVEN, bits)
            exponents -= jnp.where(integers, _TWO, 4 * _TWO)
            wanted = lax.bitcast_convert_type(exponents, jnp.float32)  # 2^k, or a 256th
        scales = _scale(bits, wanted)
        steps = _quotient(jnp.where(integers, np.float32(-1), np.float32(1)), scales)[..., None]
        codes = blocks * abs(steps)
        codes = codes if feedback else jnp.where(steps < 0, codes, _curved(codes))
        codes = _rounded(codes + np.float32(7), 0xF)
        halves = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], 2, -1)
        places = jnp.array([0, 4], jnp.uint8).reshape(*(1 for _ in codes.shape[:-1]), 2, 1)
        # Compilers keep the result of a sum; of an "or" they would code anew for each receiver.
        packed = (halves << places).sum(-2, dtype=jnp.uint8)
        return _joined(packed, scales | integers.astype(jnp.uint32) << 15)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks of float32 from what `encode` gave."""
        packed, scales = _parted(codes)
        factors = _widened(scales & np.uint32(0x7FFF))[..., None]
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
        bits = _largest(blocks)
        scales = _scale(bits, lax.bitcast_convert_type(bits, jnp.float32) / np.float32(127))
        steps = _quotient(np.float32(1), scales)[..., None]
        return _joined(_rounded(blocks * steps, 0xFF).astype(jnp.uint8), scales)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks of float32 from what `encode` gave."""
        numbers, scales = _parted(codes)
        values = lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.float32)
        return values * _widened(scales)[..., None]


def _largest(blocks: jax.Array) -> jax.Array:
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
    return (_largest(rows) < _INFINITE).all()


def _scale(bits: jax.Array, wanted: jax.Array) -> jax.Array:
    """For each block, by its largest magnitude, the bits of a bfloat16: `wanted` or the next above.

    0 for a block of zeros; NaN for one with anything that is not finite, or above 127·2^121.
    """
    magnitude = lax.bitcast_convert_type(bits, jnp.float32)
    up = (lax.bitcast_convert_type(wanted, jnp.uint32) + np.uint32(0xFFFF)) >> 16
    up = jnp.where(magnitude < _LOST, np.uint32(0), up)
    return jnp.where(bits > _TOP, _NAN, up)


def _widened(bits: jax.Array) -> jax.Array:
    """The float32 of a bfloat16's bits."""
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def _quotient(one: jax.Array | np.float32, bits: jax.Array) -> jax.Array:
    """`one` / scale; 0 where the scale is 0 or NaN.

    The division comes last, so that compilers keep its result: they would compute anything cheaper
    again for each element of the block.
    """
    scales = _widened(bits)
    return one / jnp.where(scales > 0, scales, np.float32(np.inf))


def _rounded(values: jax.Array, mask: int) -> jax.Array:
    """The nearest integers, as the lowest bits of a uint32; of what is not finite any bits."""
    return lax.bitcast_convert_type(values + _ROUNDS, jnp.uint32) & np.uint32(mask)


def _joined(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The bytes of each block's codes, and behind them the two of its scale."""
    both = jnp.stack([scales & np.uint32(0xFF), scales >> 8], axis=-1)
    return jnp.concatenate([codes, both.astype(jnp.uint8)], axis=-1)


def _parted(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undo `_joined`: return the blocks' codes, and the bits of their scales."""
    places = jnp.array([0, 8], jnp.uint32).reshape(*(1 for _ in codes.shape[:-1]), 2)
    both = codes[..., -2:].astype(jnp.uint32) << places
    return codes[..., :-2], both.sum(-1, dtype=jnp.uint32)  # compilers keep the result of a sum
