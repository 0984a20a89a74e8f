"""A ring of neighbour exchanges: reduce-scatter around it once, then gather around it again.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat


def all_reduce(packs: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each pack over all replicas along `axes`.

    Args:
      packs: arrays of any shape and dtype, each *varying* over `axes` where types tell.
      axes: names of the axes, outer first; the ring visits the replicas in that order.

    Returns:
      The sums, *invariant* over `axes`: every replica ends with the same bits. Cost: 2(n-1)
      steps an array; 2(n-1)/n of its bytes, padded to n equal shards, leave each device.
    """
    summed = []
    for k, pack in enumerate(packs):
        with jax.named_scope(f"jaxcoll_pack{k}"):
            summed.append(_compat.as_invariant(_ring(pack, axes), axes, summed=True))
    return summed


def _ring(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    n = lax.axis_size(axes)
    rank = lax.axis_index(axes)
    to_next = [(i, (i + 1) % n) for i in range(n)]
    shard = -(-array.size // n)
    shards = jnp.pad(array.reshape(-1), (0, n * shard - array.size)).reshape(n, shard)

    def mine(step: int) -> jax.Array:
        return lax.dynamic_index_in_dim(shards, (rank - step) % n, keepdims=False)

    # After n-1 steps the shard that passes through every replica, and ends here, is rank+1.
    travelling = mine(0)
    for step in range(1, n):
        travelling = lax.ppermute(travelling, axes, to_next) + mine(step)
    gathered = [travelling]
    for _ in range(1, n):
        gathered.append(lax.ppermute(gathered[-1], axes, to_next))
    # gathered[k] is shard rank+1-k: put them in order by turning the stack, not by scattering.
    in_order = jnp.roll(jnp.stack(gathered[::-1]), rank + 2, axis=0)
    return in_order.reshape(-1)[: array.size].reshape(array.shape)
