"""A ring of neighbour exchanges: reduce-scatter around it once, then gather around it again.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69 (2009).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._spmd.algorithms.exchange import passed_on, turned


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Row `rank` of the sum of (n, k) rows, by n-1 steps; (n-1)/n of the bytes are sent."""
    n, rank = len(shards), lax.axis_index(axes)

    def own_part_of(step: int) -> jax.Array:
        return lax.dynamic_index_in_dim(shards, (rank - 1 - step) % n, keepdims=False)

    # A shard sets out from the replica after its owner, and ends where it belongs.
    travelling = own_part_of(0)
    for step in range(1, n):
        travelling = passed_on(travelling, axes, 1) + own_part_of(step)
    return travelling


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """All replicas' shards, of shape (count, k), by n-1 steps; (n-1)/n of their bytes are sent."""
    gathered = [shard]
    for _ in range(1, count):
        gathered.append(passed_on(gathered[-1], axes, 1))
    # gathered[k] is shard rank-k: put them in order by turning the stack, not by scattering.
    return turned(jnp.stack(gathered[::-1]), -1 - lax.axis_index(axes))
