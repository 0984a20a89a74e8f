"""Halving, then doubling: the fewest steps that send the fewest bytes, for any replica count.

Each step of the reduce-scatter halves, rounding up, the shards that a replica still collects
for: n = s0 > s1 > ... > 1. In step k it hands the shards from s(k+1) on to the replica s(k+1)
further, and adds what comes from s(k+1) before to the others. The all-gather does the same
backwards. For powers of two these are the steps and bytes of recursive halving-doubling
(Rabenseifner 2004), which for other n needs two more steps, and more bytes.

Source: Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms",
arXiv:2410.14234 (2024).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._spmd.exchange import passed_on, turned


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This replica's own shard, summed over all replicas along `axes`.

    Args:
      shards: of shape (n, k), one row for each of n replicas, *varying* where types tell.
      axes: names of the axes, outer first.

    Returns:
      Row `rank` of the sum, of shape (k,), *varying*. Cost: ⌈log2 n⌉ steps; (n-1)/n of the bytes
      leave each device.
    """
    # Row i is from here on for the replica i further, so that all slices are known to the compiler.
    collected = turned(shards, lax.axis_index(axes))
    for many, few in _halvings(len(shards)):
        received = passed_on(collected[few:many], axes, few)
        met = many - few
        collected = jnp.concatenate([collected[:met] + received, collected[met:few]])
    return collected[0]


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """The replicas' shards along `axes`.

    Args:
      shard: this replica's own, of shape (k,).
      count: how many there are: n, as many as replicas.
      axes: names of the axes, outer first.

    Returns:
      All shards in the replicas' order, of shape (count, k), typed *varying*, with the same bits
      everywhere. Cost: ⌈log2 n⌉ steps; (n-1)/n of their bytes leave each device.
    """
    held = shard[None]
    for many, few in reversed(_halvings(count)):
        held = jnp.concatenate([held, passed_on(held[: many - few], axes, -few)])
    return turned(held, -lax.axis_index(axes))


def _halvings(n: int) -> list[tuple[int, int]]:
    """From n down to 1, each time to the half, rounded up: for 7, (7, 4), (4, 2), (2, 1)."""
    pairs = []
    while n > 1:
        pairs.append((n, -(-n // 2)))
        n = pairs[-1][1]
    return pairs
