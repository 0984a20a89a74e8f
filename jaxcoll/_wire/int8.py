"""Blocks of 8-bit multiples of a scale, rounded to nearest.

The scale is a 127th of the block's largest magnitude, rounded up to a bfloat16: a code times a
scale has no more bits than a float32, so that decoding does not round.
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
