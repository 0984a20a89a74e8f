"""The sum of coded numbers: codes to the owner of each shard, whose sum goes to all as codes.

Each element is rounded twice, whatever the number of replicas is. The owner decodes what it sent,
as all others do, so that every replica has the same bits.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan import wire_formats
from jaxcoll._spmd.algorithms.exchange import exchanged, tree_sum
from jaxcoll._spmd.wire_formats.table import CODECS


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
    # Or compilers would encode once more for what is lost, and could round otherwise there.
    sent = lax.optimization_barrier(codec.encode(rows, feedback))
    received = exchanged(sent, axes)
    own = tree_sum(codec.decode(received))
    again = lax.optimization_barrier(codec.encode(own, feedback))
    total = codec.decode(lax.all_gather(again, axes))
    lost = rows - codec.decode(sent)
    rank = _compat.as_varying(lax.axis_index(axes), axes)
    mine = lax.dynamic_index_in_dim(lost, rank, keepdims=False) + (own - codec.decode(again))
    lost = lax.dynamic_update_index_in_dim(lost, mine, rank, axis=0)
    return total.reshape(-1), lost.reshape(-1)
