"""Carry out a packing plan on arrays, and back, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxcoll._plan.leaves import Leaf
from jaxcoll._plan.packing import Pack


def pack(arrays: Sequence[jax.Array], packs: Sequence[Pack]) -> list[jax.Array]:
    """One array for each pack.

    A pack of one whole leaf is that leaf, in its own shape and without a copy; any other is
    flat. Law: `unpack(pack(arrays, packs), packs, leaves)` is `arrays`, to the bit (but for
    the sign and payload of a bfloat16 or 8-bit NaN, which XLA's CPU compiler does not keep).

    Args:
      arrays: the leaves.
      packs: the plan.

    Returns:
      The packs' arrays, in the plan's order.
    """
    flat: dict[int, jax.Array] = {}

    def piece(leaf: int, start: int, size: int) -> jax.Array:
        if leaf not in flat:
            flat[leaf] = arrays[leaf].reshape(-1)
        whole = size == arrays[leaf].size
        return flat[leaf] if whole else flat[leaf][start : start + size]

    return [
        arrays[p.segments[0].leaf]
        if _is_leaf(p, arrays[p.segments[0].leaf].size)
        else jnp.concatenate([piece(s.leaf, s.start, s.size) for s in p.segments])
        for p in packs
    ]


def unpack(
    packed: Sequence[jax.Array], packs: Sequence[Pack], leaves: Sequence[Leaf]
) -> list[jax.Array | None]:
    """The leaves again, in their order and shapes; None for those that no pack carries."""
    pieces: dict[int, list[jax.Array]] = {}
    for array, plan in zip(packed, packs, strict=True):
        if _is_leaf(plan, leaves[plan.segments[0].leaf].size):
            pieces[plan.segments[0].leaf] = [array]
            continue
        offset = 0
        for s in plan.segments:
            pieces.setdefault(s.leaf, []).append(array[offset : offset + s.size])
            offset += s.size
    return [_joined(pieces[i], leaf) if i in pieces else None for i, leaf in enumerate(leaves)]


def _is_leaf(plan: Pack, leaf_size: int) -> bool:
    return len(plan.segments) == 1 and plan.segments[0].size == leaf_size


def _joined(pieces: list[jax.Array], leaf: Leaf) -> jax.Array:
    whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
    return whole if whole.shape == leaf.shape else whole.reshape(leaf.shape)
