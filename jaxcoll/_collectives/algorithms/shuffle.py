"""A shuffle, as between workers and parameter servers: the owner of a shard sums it.

Every replica sends each owner its part directly, and every owner sends the sum to all replicas. The
first m of n replicas own the m shards. With m = n all do the same work, and send the fewest bytes;
owners then add in the fixed order of `tree_sum`, so that an element's bits do not depend on its
position.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014);
TensorFlow's `build_shuffle_all_reduce`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._collectives.algorithms.exchange import copies, exchange, pass_on, tree_sum


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return row `rank` of the sum of (m, k) rows, m <= n; unspecified where rank is m or more.

    Cost: one all-to-all; with m < n instead n-1 independent exchanges. A device sends a shard to
    each other owner.
    """
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    if len(shards) == n:
        return tree_sum(exchange(shards, axes))

    def part_for(distance: int) -> jax.Array:
        return lax.dynamic_index_in_dim(shards, (rank + distance) % n, keepdims=False)

    total = part_for(0)
    for distance in range(1, n):
        total += pass_on(part_for(distance), axes, distance, receivers=len(shards))
    return total


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Return all shards in their owners' order, (count, k); `shard` is unused from rank `count` on.

    Cost: that of `reduce_scatter`, but an owner sends its shard to all other replicas.
    """
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    if count == n:
        # An all-gather would have Gloo's reduce-scatter as its derivative.
        return exchange(jnp.stack(copies(shard, n)), axes)
    # An extra last row takes what replicas without a shard send.
    shards = jnp.zeros((count + 1, *shard.shape), shard.dtype)
    for distance in range(n):
        sent = pass_on(shard, axes, distance, senders=count) if distance else shard
        owner = jnp.minimum((rank - distance) % n, count)
        shards = lax.dynamic_update_index_in_dim(shards, sent, owner, axis=0)
    return shards[:count]
