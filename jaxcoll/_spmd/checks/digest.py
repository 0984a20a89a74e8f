"""A digest of an array's bits: two numbers that tell whether two replicas hold the same."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

WORDS = 2
"""32-bit words in a digest."""


def digest(x: jax.Array) -> jax.Array:
    """Two words that depend on every bit of `x` and on where it stands.

    Law: they are the same for the same bits, in whatever order they are added up, since integers
    wrap around; NaNs and the sign of zero count as bits. One element that differs always changes
    the first word; anything else escapes both with a chance of 2⁻⁶⁴.

    Each element is mixed with its position by the finalizer of MurmurHash3 (Austin Appleby),
    which loses no bit, and the results are summed, plain and multiplied by an odd number of the
    position. Cost: `x` is read once, and nothing of its size is written.

    Returns:
      uint32[2], varying where `x` does.
    """
    if not x.size:
        return jnp.zeros((WORDS,), jnp.uint32)
    word = _words(x)
    place = _positions(word.shape)
    mixed = _mixed(word ^ (place * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)))
    weighted = mixed * (place + place + jnp.uint32(1))
    zero = jnp.uint32(0)
    sums = lax.reduce(
        (mixed, weighted),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(word.ndim)),
    )
    return jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
    """The bits of `x`, a 32-bit word an element, or two of a wider one."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag]))
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    of = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    bits = of(x.dtype).bits
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Where each element stands in its array, counted without reshaping it."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return place


def _mixed(word: jax.Array) -> jax.Array:
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))
