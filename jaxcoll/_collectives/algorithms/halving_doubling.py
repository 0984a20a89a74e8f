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


def all_reduce(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum (n, k) rows over the replicas; for a power of two in one step less than the two halves.

    The last pair to halve would send each other half of what it still sums, and then at once the
    sums of these halves. So both send the whole, and both add: the same bytes in one step.
    """
    bits = _bits(len(shards))
    if bits is None:
        return all_gather(reduce_scatter(shards, axes), len(shards), axes)
    *others, last = bits
    shards = _compat.store(shards)
    for bit in others:
        shards = _halve(shards, axes, bit)
    # a + b = b + a to the bit, but for two NaNs
    shards = _compat.unify_nans(shards + swap(shards, axes, last))
    for bit in reversed(others):
        shards = _double(shards, axes, bit)
    return _compat.store(shards)


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return row `rank` of the sum of (n, k) rows in ⌈log2 n⌉ steps; sends (n-1)/n of the bytes."""
    bits = _bits(len(shards))
    if bits is None:
        # Rotate so that row i is for the replica i further, and all slices are static.
        shards = rotate(shards, lax.axis_index(axes))
        for many, few in _halvings(len(shards)):
            received = pass_on(shards[few:many], axes, few)
            kept = many - few
            shards = jnp.concatenate([shards[:kept] + received, shards[kept:few]])
        return shards[0]
    shards = _compat.store(shards)
    for bit in bits:
        shards = _halve(shards, axes, bit)
    return shards[0]


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Return all shards, (count, k), in ⌈log2 n⌉ steps; sends (n-1)/n of their bytes."""
    shards, bits = shard[None], _bits(count)
    if bits is None:
        for many, few in reversed(_halvings(count)):
            shards = jnp.concatenate([shards, pass_on(shards[: many - few], axes, -few)])
        return rotate(shards, -lax.axis_index(axes))
    for bit in reversed(bits):
        shards = _double(shards, axes, bit)
    return _compat.store(shards)


def _halve(shards: jax.Array, axes: tuple[str, ...], bit: int) -> jax.Array:
    """Sum the half of the shards that this replica keeps over a pair.

    Then they are sums over a block of 2·bit replicas. Which of a pair adds does not matter, as
    a + b = b + a to the bit: all shards have the same tree. What is added here was stored, as what
    the partner sent was, and both were rounded alike.
    """
    # Even and odd rows: with halves that lie together, every second run of one compiled program had
    # wrong sums (scan_layers with these steps, simulated devices of JAX 0.12).
    halves = shards.reshape(-1, 2, shards.shape[-1])
    mine = _bit_of_rank(axes, bit)
    total = _half(halves, mine) + swap(_half(halves, 1 - mine), axes, bit)
    # XLA adds 16-bit floats in float32 on CPUs, and within a kernel it would not round in between.
    return _compat.store(total) if total.dtype.itemsize < 4 else total


def _double(shards: jax.Array, axes: tuple[str, ...], bit: int) -> jax.Array:
    theirs, is_lower = swap(shards, axes, bit), _bit_of_rank(axes, bit) == 0
    pair = jnp.where(is_lower, shards, theirs), jnp.where(is_lower, theirs, shards)
    return jnp.stack(pair, axis=1).reshape(-1, shards.shape[-1])


def _bit_of_rank(axes: tuple[str, ...], bit: int) -> jax.Array:
    # `//` and `%` of signed numbers would be kernels of their own.
    return lax.axis_index(axes) >> (bit.bit_length() - 1) & 1


def _bits(n: int) -> Sequence[int] | None:
    """Return the bits of a rank, 1, 2, 4, ..., below n; None if n is not a power of two."""
    exponent = n.bit_length() - 1
    return [1 << k for k in range(exponent)] if n == 1 << exponent else None


def _half(halves: jax.Array, which: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(
        halves, which, axis=1, keepdims=False, allow_negative_indices=False
    )


def _halvings(n: int) -> list[tuple[int, int]]:
    """Halve n down to 1, rounding up, and return the steps: for 7, (7, 4), (4, 2), (2, 1)."""
    pairs = []
    while n > 1:
        pairs.append((n, -(-n // 2)))
        n = pairs[-1][1]
    return pairs
