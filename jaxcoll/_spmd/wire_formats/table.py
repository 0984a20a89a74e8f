"""The table of wire formats."""

from __future__ import annotations

from typing import Protocol

import jax

from jaxcoll._spmd.wire_formats import bf16, int4, int8


class Codec(Protocol):
    """What every format's file defines."""

    def encode(self, values: jax.Array, block: int, /) -> jax.Array:
        """Rows of float32, of whole blocks, as rows of uint8 or uint16."""
        ...

    def decode(self, codes: jax.Array, block: int, /) -> jax.Array:
        """Rows of float32; what was not finite makes its block so."""
        ...


CODECS: dict[str, Codec] = {"bf16": bf16, "int8": int8, "int4": int4}
