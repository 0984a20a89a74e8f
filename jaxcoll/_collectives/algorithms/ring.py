"""A ring of neighbours: shards go around once to be summed, and once more to be gathered.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69 (2009).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._collectives.algorithms.exchange import pass_on, rotate


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return row `rank` of the sum of (n, k) rows, in n-1 steps; sends (n-1)/n of the bytes."""
    n, rank = len(shards), lax.axis_index(axes)

    def summand(step: int) -> jax.Array:
        return lax.dynamic_index_in_dim(shards, (rank - 1 - step) % n, keepdims=False)

    # A shard starts at the replica after its owner, and ends at its owner.
    partial_sum = summand(0)
    for step in range(1, n):
        partial_sum = pass_on(partial_sum, axes, 1) + summand(step)
    return partial_sum


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Return all shards, of shape (count, k), in n-1 steps; sends (n-1)/n of their bytes."""
    gathered = [shard]
    for _ in range(1, count):
        gathered.append(pass_on(gathered[-1], axes, 1))
    # gathered[k] is shard rank-k; rotating the reversed stack is cheaper than scattering it.
    return rotate(jnp.stack(gathered[::-1]), -1 - lax.axis_index(axes))
