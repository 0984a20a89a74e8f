"""Recursive halving, then doubling: the fewest steps and the fewest bytes for any replica count.

For a power of two, replicas exchange in pairs: first neighbours, then at twice the distance, and
so on. In each step the two replicas of a pair split the shards that both still sum: each keeps
those whose index has the same bit as its rank, and sends the others. Every element is summed in
the same order, ((0+1)+(2+3))+((4+5)+(6+7)).

For any other n, each step of the reduce-scatter halves, rounding up, the number of shards that a
replica still sums: n = s0 > s1 > ... > 1. In step k a replica sends the shards from s(k+1) on to
the replica s(k+1) further, and adds what it receives from s(k+1) before to the shards that it
keeps. Recursive halving in pairs would need two more steps, and more bytes. The order of a sum then
depends on the shard. In both cases the all-gather takes the same steps backwards.

Sources: Rabenseifner, "Optimization of Collective Reduction Operations" (2004); Träff, "Optimal,
Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234 (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms.exchange import pass_on, rotate, swap


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return row `rank` of the sum of (n, k) rows in ⌈log2 n⌉ steps; sends (n-1)/n of the bytes."""
    rank, bits = lax.axis_index(axes), _bits(len(shards))
    if bits is None:
        # Rotate so that row i is for the replica i further, and all slices are static.
        shards = rotate(shards, rank)
        for many, few in _halvings(len(shards)):
            received = pass_on(shards[few:many], axes, few)
            kept = many - few
            shards = jnp.concatenate([shards[:kept] + received, shards[kept:few]])
        return shards[0]
    # After the step of `bit`, a replica's shards are sums over its block of 2·bit replicas. Which
    # of a pair adds does not matter, as a + b = b + a to the bit: all shards have the same tree.
    for bit in bits:
        halves = shards.reshape(-1, 2, shards.shape[-1])
        mine = rank // bit % 2
        received = swap(_half(halves, 1 - mine), axes, bit)
        # Store this half, too: the partner's was stored to be sent, and both must be rounded alike.
        shards = _compat.round_as_stored(_half(halves, mine)) + received
    return shards[0]


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Return all shards, (count, k), in ⌈log2 n⌉ steps; sends (n-1)/n of their bytes."""
    shards, rank, bits = shard[None], lax.axis_index(axes), _bits(count)
    if bits is None:
        for many, few in reversed(_halvings(count)):
            shards = jnp.concatenate([shards, pass_on(shards[: many - few], axes, -few)])
        return rotate(shards, -rank)
    for bit in reversed(bits):
        received = swap(shards, axes, bit)
        # A branch copies each half once; `jnp.where` would read both halves for each.
        own = _compat.round_as_stored(shards, backward=True)
        both = lax.cond(
            rank // bit % 2 == 0, _pairs, lambda own, other: _pairs(other, own), own, received
        )
        shards = both.reshape(-1, shards.shape[-1])
    return shards


def _bits(n: int) -> Sequence[int] | None:
    """Return the bits of a rank, 1, 2, 4, ..., below n; None if n is not a power of two."""
    exponent = n.bit_length() - 1
    return [1 << k for k in range(exponent)] if n == 1 << exponent else None


def _half(halves: jax.Array, which: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(halves, which, axis=1, keepdims=False)


def _pairs(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.stack([first, second], axis=1)


def _halvings(n: int) -> list[tuple[int, int]]:
    """Halve n down to 1, rounding up, and return the steps: for 7, (7, 4), (4, 2), (2, 1)."""
    pairs = []
    while n > 1:
        pairs.append((n, -(-n // 2)))
        n = pairs[-1][1]
    return pairs
