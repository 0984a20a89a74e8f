"""The compiler's own collectives behind the algorithms' signature; the baseline of all others."""

from __future__ import annotations

import jax
from jax import lax


def all_reduce(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of `array` over all replicas along `axes`.

    Args:
      array: of any shape and dtype, *varying* over `axes` where types tell.
      axes: names of the axes, outer first.

    Returns:
      The sum, in the array's shape, *invariant* over `axes`. Cost: one all-reduce is requested;
      compilers combine several. 2(n-1)/n of the bytes leave each device with a byte-optimal
      backend.
    """
    return lax.psum(array, axes)


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This replica's own shard, summed over all replicas along `axes`.

    Args:
      shards: of shape (n, ...), one row for each of n replicas. Of rows without dimensions TPUs
        make an all-reduce.
      axes: names of the axes, outer first.

    Returns:
      Row `rank` of the sum, *varying*. Cost: one collective; (n-1)/n of the bytes.
    """
    return lax.psum_scatter(shards, axes)


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """The replicas' shards along `axes`.

    Args:
      shard: this replica's own, of any shape.
      count: how many there are: as many as replicas.
      axes: names of the axes, outer first.

    Returns:
      All shards in the replicas' order, of shape (count, ...), typed *varying*, with the same bits
      everywhere. Cost: one collective; (n-1)/n of their bytes.
    """
    return lax.all_gather(shard, axes)
