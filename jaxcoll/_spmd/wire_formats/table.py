"""The table of wire formats."""

from __future__ import annotations

from typing import Protocol

import jax

from jaxcoll._spmd.wire_formats import bf16, int4, int8


class Codec(Protocol):
    """What every format's file defines."""

    def encode(self, blocks: jax.Array, /, feedback: bool) -> jax.Array:
        """Blocks of float32, of shape (..., m, block), as uint8 or uint16 of shape (..., m, w).

        With `feedback`, what a block loses is added to it the next time.
        """
        ...

    def decode(self, codes: jax.Array, /, feedback: bool) -> jax.Array:
        """Blocks of float32; one with anything that was not finite is not finite anywhere there.

        `feedback` is what it was when they were coded.
        """
        ...


CODECS: dict[str, Codec] = {"bf16": bf16, "int8": int8, "int4": int4}
