"""The wire formats: bfloat16, and block formats of 4 and 8 bits.

A scale is a bfloat16, rounded up. A code times a scale fits into a float32: decoding is exact.

`Int4` has two sets of levels. Fitted levels minimize the squared error of Gaussian numbers divided
by the largest magnitude of their block of 64 (Lloyd, "Least squares quantization in PCM", 1982);
they are rounded to 256ths. Even levels are integer multiples of the scale. They serve blocks whose
largest magnitude is 7·2^k (mostly blocks of integers; the scale's sign bit marks them), and always
error feedback: fitted levels lie far apart at the ends, so that the largest numbers would leave
larger residuals, and training would suffer.
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

from jaxcoll._compression.format import WireFormat

_INFINITE = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC0)
_LARGEST = np.uint32(0x7F7E0000)
"""The bits of 127·2^121; above it, 127 times the scale, which is rounded up, may be infinite."""

_SMALLEST = np.float32(1e-34)
"""Blocks of less become zero: XLA flushes subnormals, and 1 / subnormal is infinite."""

_ROUNDER = np.float32(3 << 22)
"""Adding this to a float32 below 2^22 rounds it to the nearest integer, ties to even, and leaves
the integer in the lowest bits of the sum. A conversion to integers would clamp first."""


@dataclasses.dataclass(frozen=True)
class Bf16(WireFormat):
    """bfloat16: the upper half of a float32, rounded to nearest; 2 bytes an element.

    What bfloat16 can represent arrives exactly. Error of a sum, rounded twice: 0.0024 of the norm.

    Examples:
      >>> Bf16().nbytes(1000)
      2000
    """

    block: int = dataclasses.field(default=1, init=False, repr=False)

    name: ClassVar[str] = "bf16"
    scale_bytes: ClassVar[int] = 0
    min_size: ClassVar[int] = 64
    # float16 is as short, and has more bits of mantissa.
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    passes: ClassVar[float] = 0.6

    def __post_init__(self) -> None:
        pass

    def encode(self, blocks: jax.Array, feedback: bool) -> jax.Array:
        """Round each float32 to the nearest bfloat16, ties to even; return its bits as uint16.

        In integers: XLA's CPU compiler would store converted floats, and copy them per receiver.
        """
        bits = lax.bitcast_convert_type(blocks, jnp.uint32)
        up = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        is_nan = bits & np.uint32(0x7FFFFFFF) > _INFINITE
        return (jnp.where(is_nan, bits | np.uint32(0x400000), up) >> 16).astype(jnp.uint16)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Decode the result of `encode` to float32."""
        return _widen(codes.astype(jnp.uint32))


LEVELS = (-241, -186, -145, -111, -81, -53, -26, 0, 21, 43, 67, 92, 120, 154, 194, 245)
"""The fitted level of each code, in 256ths."""

_BELOW = (26.3636364, 0.0400091575, 0.0025183150)
_ABOVE = (21.3287493, 0.0882411859, 0.0008780716)
"""Coefficients of odd polynomials that come within 0.42 of the fitted levels: `_BELOW` for codes -7
to -1, `_ABOVE` for 1 to 8. Rounding them takes half as long as a table look-up."""

_CURVE = (11.9386 / 256, -6.6751 / 256**3, 3.1613 / 256**5)
_NEGATIVE = np.float32(0.8236)
"""Coefficients of an odd polynomial from the midpoints of levels k and k + 1 to about k + 1/2, and
a factor for negative numbers, which have one level less. Fifteen comparisons would gain 0.2 %."""

_SEVEN = np.uint32(0x600000)
"""The mantissa of 7·2^k."""

_SEVENTH = np.float32(1 / 7)
"""The factor from 7·2^k to 2^k."""

_QUARTER = np.uint32(2 << 23)
"""Subtracting this from a float32's bits divides the number by 4."""


@dataclasses.dataclass(frozen=True)
class Int4(WireFormat):
    """One of 16 levels for each element, a scale for each block: 4 bits + 2/block byte an element.

    The levels are fitted to Gaussian numbers divided by the largest magnitude of their block. Under
    error feedback, and where that magnitude is 7·2^k, they are -7 to 7 times the scale.

    Zeros, and blocks of multiples of 2^k with the largest magnitude 7·2^k, arrive exactly. A sum of
    Gaussian numbers is rounded twice for any number of replicas; its error is 0.125 of its norm.

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
        """Encode blocks as bytes, of shape (..., m, block / 2 + 2)."""
        bits = _largest(blocks)
        # No divisions: each would be a kernel of its own.
        if feedback:
            even = jnp.ones_like(bits, bool)
            wanted = lax.bitcast_convert_type(bits, jnp.float32) * _SEVENTH
        else:
            even = (bits & np.uint32(0x7FFFFF)) == _SEVEN
            exponents = jnp.where(even, bits - _SEVEN, bits)
            exponents -= jnp.where(even, _QUARTER, 4 * _QUARTER)
            wanted = lax.bitcast_convert_type(exponents, jnp.float32)  # 2^k, or a 256th if fitted
        scales = _scale(bits, wanted)
        # A negative step marks a block with even levels.
        steps = _quotient(jnp.where(even, np.float32(-1), np.float32(1)), scales)[..., None]
        codes = blocks * abs(steps)
        codes = codes if feedback else jnp.where(steps < 0, codes, _bend(codes))
        codes = _round(codes + np.float32(7), 0xF)
        halves = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], 2, -1)
        shifts = jnp.array([0, 4], jnp.uint8).reshape(*(1 for _ in codes.shape[:-1]), 2, 1)
        # Compilers store a sum; they would compute an "or", and all before it, for each receiver.
        packed = (halves << shifts).sum(-2, dtype=jnp.uint8)
        return _append_scales(packed, scales | even.astype(jnp.uint32) << 15)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        packed, scales = _split_scales(codes)
        factors = _widen(scales & np.uint32(0x7FFF))[..., None]
        halves = [
            half.astype(jnp.float32) - np.float32(7)
            for half in (packed & np.uint8(0xF), packed >> np.uint8(4))
        ]
        if feedback:
            # This changes no value. LLVM would unroll a smaller loop instead of vectorizing it.
            halves = [jnp.clip(half, -7, 8) for half in halves]
        else:
            even = (scales >> 15 == 1)[..., None]
            halves = [jnp.where(even, half, _levels(half)) for half in halves]
        return jnp.concatenate([half * factors for half in halves], axis=-1)


def _levels(codes: jax.Array) -> jax.Array:
    """Return the `LEVELS` of codes from -7 to 8, exactly."""
    squares = codes * codes
    a, b, c = (
        jnp.where(codes < 0, *map(np.float32, pair)) for pair in zip(_BELOW, _ABOVE, strict=True)
    )
    fitted = codes * (a + squares * (b + squares * c))
    return lax.round(fitted, lax.RoundingMethod.TO_NEAREST_EVEN)


def _bend(values: jax.Array) -> jax.Array:
    """Map `values`, in 256ths of the largest, so that rounding finds the code of their level."""
    a, b, c = map(np.float32, _CURVE)
    values = jnp.maximum(values, values * _NEGATIVE)
    squares = values * values
    return values * (a + squares * (b + squares * c))


@dataclasses.dataclass(frozen=True)
class Int8(WireFormat):
    """Multiples -127 to 127 of a scale for each block: 1 + 2/block bytes an element.

    Zeros, and blocks of multiples of 2^k with the largest magnitude 127·2^k, arrive exactly. A sum
    of Gaussian numbers is rounded twice for any number of replicas; its error: 0.0099 of its norm.

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
        """Encode blocks as bytes, of shape (..., m, block + 2)."""
        bits = _largest(blocks)
        scales = _scale(bits, lax.bitcast_convert_type(bits, jnp.float32) / np.float32(127))
        steps = _quotient(np.float32(1), scales)[..., None]
        return _append_scales(_round(blocks * steps, 0xFF).astype(jnp.uint8), scales)

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        numbers, scales = _split_scales(codes)
        values = lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.float32)
        return values * _widen(scales)[..., None]


def _largest(blocks: jax.Array) -> jax.Array:
    """Return the bits of the largest magnitude along the last axis; NaN counts as above infinity.

    XLA's CPU compiler drops NaN from maxima of floats, not of integers (openxla/xla#21461).
    """
    bits = lax.bitcast_convert_type(blocks, jnp.uint32) & np.uint32(0x7FFFFFFF)
    # XLA's CPU compiler vectorizes a maximum of two halves, but not a reduction. It makes a second
    # kernel after three halvings, and is slower on fewer than 32 numbers.
    while bits.shape[-1] > 32 and bits.shape[-1] % 2 == 0:
        bits = jnp.maximum(*jnp.split(bits, 2, axis=-1))
    return bits.max(-1)


def finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return whether all real and complex floats in `arrays` are finite; ignore other types."""
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, np.inexact) and x.size]
    return functools.reduce(jnp.logical_and, map(_all_finite, floats), jnp.array(True))


def _all_finite(array: jax.Array) -> jax.Array:
    if array.dtype.itemsize > 4:
        return jnp.isfinite(array).all()
    flat = array.astype(jnp.float32).reshape(-1)
    rows = jnp.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    return (_largest(rows) < _INFINITE).all()


def _scale(bits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the `wanted` scale of each block, rounded up to a bfloat16, as bits.

    `bits` are the block's largest magnitude. If that is zero, so is the scale; if it is not finite,
    or above 127·2^121, the scale is NaN.
    """
    magnitude = lax.bitcast_convert_type(bits, jnp.float32)
    up = (lax.bitcast_convert_type(wanted, jnp.uint32) + np.uint32(0xFFFF)) >> 16
    up = jnp.where(magnitude < _SMALLEST, np.uint32(0), up)
    return jnp.where(bits > _LARGEST, _NAN, up)


def _widen(bits: jax.Array) -> jax.Array:
    """Return the float32 with the value of a bfloat16, given as bits."""
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def _quotient(one: jax.Array | np.float32, bits: jax.Array) -> jax.Array:
    """Return `one` / scale, or 0 where the scale, given as bits, is 0 or NaN.

    The division comes last, so that compilers store its result: they would compute anything cheaper
    once more for each element of the block.
    """
    scales = _widen(bits)
    return one / jnp.where(scales > 0, scales, np.float32(np.inf))


def _round(values: jax.Array, mask: int) -> jax.Array:
    """Round to the nearest integers; return the bits in `mask`, arbitrary if not finite."""
    return lax.bitcast_convert_type(values + _ROUNDER, jnp.uint32) & np.uint32(mask)


def _append_scales(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Append the two bytes of each block's scale to the bytes of its codes."""
    both = jnp.stack([scales & np.uint32(0xFF), scales >> 8], axis=-1)
    return jnp.concatenate([codes, both.astype(jnp.uint8)], axis=-1)


def _split_scales(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undo `_append_scales`: return the codes of each block and the bits of its scale."""
    shifts = jnp.array([0, 8], jnp.uint32).reshape(*(1 for _ in codes.shape[:-1]), 2)
    both = codes[..., -2:].astype(jnp.uint32) << shifts
    return codes[..., :-2], both.sum(-1, dtype=jnp.uint32)  # compilers store the result of a sum
