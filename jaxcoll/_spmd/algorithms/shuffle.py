"""A shuffle, as between workers and parameter servers: each shard is summed by its owner.

Every replica sends each owner its part directly, and every owner sends the sum to everybody. An
owner adds in the fixed order of `tree_sum`, if there are as many as replicas, so that the bits do
not depend on where an element stands.
The first m of n replicas own the m shards; with m = n all do the same work, and no device sends
more than it has to.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014);
TensorFlow's `build_shuffle_all_reduce`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._spmd.algorithms.exchange import copies, exchanged, passed_on, tree_sum


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Row `rank` of the sum of (m, k) rows, m <= n; unspecified where rank is m or more.

    Cost: one all-to-all, or with m < n as many exchanges as there are other replicas, none of which
    waits for another; a device sends each other owner a shard.
    """
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    if len(shards) == n:
        return tree_sum(exchanged(shards, axes))

    def part_for(distance: int) -> jax.Array:
        return lax.dynamic_index_in_dim(shards, (rank + distance) % n, keepdims=False)

    total = part_for(0)
    for distance in range(1, n):
        total += passed_on(part_for(distance), axes, distance, receivers=len(shards))
    return total


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """All shards in their owners' order, of shape (count, k); unused where rank is `count` or more.

    Cost: as that of `reduce_scatter`; an owner sends its shard to all others.
    """
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    if count == n:
        # Not an all-gather: its derivative would be Gloo's reduce-scatter.
        return exchanged(jnp.stack(copies(shard, n)), axes)
    # What comes from replicas that own nothing goes to a row behind the others.
    shards = jnp.zeros((count + 1, *shard.shape), shard.dtype)
    for distance in range(n):
        sent = passed_on(shard, axes, distance, senders=count) if distance else shard
        owner = jnp.minimum((rank - distance) % n, count)
        shards = lax.dynamic_update_index_in_dim(shards, sent, owner, axis=0)
    return shards[:count]
