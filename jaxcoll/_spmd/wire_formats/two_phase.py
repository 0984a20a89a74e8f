"""The sum of coded numbers: codes to the owner of each shard, whose sum goes to all as codes.

Each element is rounded twice, whatever the number of replicas is. The owner decodes what it sent,
as all others do, so that every replica has the same bits.
"""

from __future__ import annotations

from typing import Protocol

import jax
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan import wire_formats
from jaxcoll._spmd.algorithms.exchange import exchanged, tree_sum
from jaxcoll._spmd.wire_formats import bf16, int4, int8


class Codec(Protocol):
    """What every format's file defines."""

    def encode(self, blocks: jax.Array, feedback: bool, /) -> jax.Array:
        """Blocks of float32, of shape (..., m, block), as uint8 or uint16 of shape (..., m, w).

        With `feedback`, what a block loses is added to it the next time.
        """
        ...

    def decode(self, codes: jax.Array, /) -> jax.Array:
        """Blocks of float32; one with anything that was not finite is not finite anywhere there."""
        ...


CODECS: dict[str, Codec] = {"bf16": bf16, "int8": int8, "int4": int4}


def all_reduce(
    flat: jax.Array, format: str, axes: tuple[str, ...], feedback: bool
) -> tuple[jax.Array, jax.Array]:
    """The sum of `flat` over the replicas along `axes`, and what this replica's share of it lost.

    Law: over the replicas, sum(flat - lost) = sum, to rounding in float32. What the second rounding
    takes is counted among what the shard's owner lost.

    Args:
      flat: float32, of as many whole blocks for each replica.
      format: the wire format's name, its block included.
      axes: names of the axes, outer first.
      feedback: whether what is lost is sent the next time.

    Returns:
      Two arrays like `flat`, *varying*: the sum, with the same bits everywhere, and what was lost.
      Cost: an all-to-all and an all-gather of codes; 2(n-1) coded shards leave a device.
    """
    known = wire_formats.of(format)
    codec = CODECS[known.name]
    rows = flat.reshape(lax.axis_size(axes), -1, known.block)
    sent = codec.encode(rows, feedback)
    received = exchanged(sent, axes)
    own = tree_sum(codec.decode(received))
    again = codec.encode(own, feedback)
    total = codec.decode(lax.all_gather(again, axes))
    # Or compilers would decode what is not yet stored, and so encode again for every element.
    sent, again = lax.optimization_barrier((sent, again))
    lost = rows - codec.decode(sent)
    rank = _compat.as_varying(lax.axis_index(axes), axes)
    mine = lax.dynamic_index_in_dim(lost, rank, keepdims=False) + (own - codec.decode(again))
    lost = lax.dynamic_update_index_in_dim(lost, mine, rank, axis=0)
    return total.reshape(-1), lost.reshape(-1)
