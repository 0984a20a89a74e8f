"""The pipeline of every collective: pack leaves, communicate the packs of a plan, and unpack them.

A collective supplies three functions of a pack: what enters, what carries it, and what leaves. A
`Recipe` has the arithmetic of a sum: its wire type, a mean's division, the type of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import Leaf, accumulation_dtype, exact_dtype, is_key, reveal_key
from jaxcoll._plan.packs.packing import Pack
from jaxcoll._plan.plan import CollectivePlan


def pack(
    arrays: Sequence[jax.Array],
    packs: Sequence[Pack],
    leaves: Sequence[Leaf | jax.Array],
    elements: Callable[[Pack], int] | None = None,
) -> list[jax.Array]:
    """Return one array for each pack, padded with zeros to `elements(pack)`.

    A pack of one whole leaf is that leaf, in its own shape and without a copy; any other pack is
    flat. `unpack(pack(arrays, packs, leaves), packs, leaves)` is bitwise equal to `arrays`, except
    for the sign and payload of a bfloat16 or 8-bit NaN, which XLA's CPU compiler does not keep.
    """
    flat: dict[int, jax.Array] = {}

    def piece(leaf: int, start: int, size: int) -> jax.Array:
        if leaf not in flat:
            flat[leaf] = arrays[leaf].reshape(-1)
        whole = size == arrays[leaf].size
        return flat[leaf] if whole else flat[leaf][start : start + size]

    def join(p: Pack) -> jax.Array:
        *lengths, last = p.lengths
        lengths.append(max(last, elements(p) - sum(lengths)) if elements else last)
        pieces = zip(p.segments, lengths, strict=True)
        return jnp.concatenate([_pad(piece(s.leaf, s.start, s.size), k) for s, k in pieces])

    return [arrays[p.segments[0].leaf] if p.is_leaf(leaves) else join(p) for p in packs]


def _pad(piece: jax.Array, length: int) -> jax.Array:
    return jnp.pad(piece, (0, length - piece.size)) if length > piece.size else piece


def carry_out(
    plan: CollectivePlan,
    packed: Iterable[Any],
    carry: Callable[[Pack, Any], Any],  # the collective
    *,
    enter: Callable[[Pack, Any], Any] = lambda _, array: array,  # from a packed array to its input
    leave: Callable[[Pack, Any], Any] = lambda _, array: array,  # from its output to the result
) -> list[Any]:
    """Communicate each pack of `plan` in a named scope of the program; return the results."""
    carried: list[Any] = []
    for k, (pack, array) in enumerate(zip(plan.packs, packed, strict=True)):
        with jax.named_scope(f"{plan.name}/pack{k}"):
            array = enter(pack, array)
            if plan.chained and carried:
                array = _compat.order_after(array, after=jax.tree.leaves(carried[-1])[0])
            carried.append(carry(pack, array))
    # In a loop of its own, so that no pack waits for the arithmetic after the pack before it.
    results = []
    for k, (pack, array) in enumerate(zip(plan.packs, carried, strict=True)):
        with jax.named_scope(f"{plan.name}/pack{k}"):
            results.append(leave(pack, array))
    return results


def unpack(
    packed: Iterable[jax.Array],
    packs: Sequence[Pack],
    leaves: Sequence[Leaf | jax.Array],
    on_cpus: bool = False,
) -> list[jax.Array | None]:
    """Return the leaves, in their order and shapes; None for those that no pack carries.

    Slices with static offsets fuse best. But XLA's CPU compiler makes a kernel for each of them, in
    some 6 ms; it makes one kernel for all slices of one shape if it does not know their offsets.
    With `on_cpus`, a call that it does not look into therefore returns them.
    """
    pieces: dict[int, list[jax.Array]] = {}
    for array, pack in zip(packed, packs, strict=True):
        if pack.is_leaf(leaves):
            pieces[pack.segments[0].leaf] = [array]
            continue
        for s, piece in zip(pack.segments, _cut(array, pack, on_cpus), strict=True):
            pieces.setdefault(s.leaf, []).append(piece)
    result: list[jax.Array | None] = []
    for i, leaf in enumerate(leaves):
        if i not in pieces:
            result.append(None)
            continue
        whole = pieces[i][0] if len(pieces[i]) == 1 else jnp.concatenate(pieces[i])
        result.append(whole if whole.shape == leaf.shape else whole.reshape(leaf.shape))
    return result


def _cut(array: jax.Array, pack: Pack, on_cpus: bool) -> list[jax.Array]:
    """Cut a pack into its pieces, in order."""
    pieces_of_size = Counter(s.size for s in pack.segments)
    starts = list(itertools.accumulate(pack.lengths, initial=0))
    parts = [(start, s.size) for start, s in zip(starts, pack.segments, strict=False)]
    alike = tuple(start for start, size in parts if pieces_of_size[size] > 1)
    unknown: dict[int, jax.Array] = {}
    if on_cpus and alike and array.size <= np.iinfo(np.int32).max:
        given = _compat.forbid_fusion(_return_numbers, numbers=alike)()
        unknown = dict(zip(alike, given, strict=True))
    return [
        lax.dynamic_slice(array, (unknown[start],), (size,), allow_negative_indices=False)
        if start in unknown
        else array[start : start + size]
        for start, size in parts
    ]


def _return_numbers(*, numbers: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.int32(number) for number in numbers]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arithmetic of a leaf's reduction; leaves share a pack only if theirs is equal."""

    # Axes of the sum, without those of size one; empty: nothing is sent
    over: tuple[str, ...]
    axes: tuple[str, ...]  # all axes of the reduction, over which the result is invariant
    # Every axis that the leaf varies over: in one pack, leaves with fewer would get a wider type
    varying: frozenset[str]
    dtype: np.dtype  # the leaf's type
    wire: np.dtype  # the type of the sum, also on the wire
    times: int  # the factor of a SUM: how many replicas hold the same value
    divisor: int | None  # the divisor of a MEAN; None for a SUM

    @property
    def halvings(self) -> int:
        """The power of two that scales a float16 down before a mean, so that no sum overflows."""
        if self.divisor is None or self.wire != np.float16 or not self.over:
            return 0
        return halvings(self.divisor)


def halvings(summands: int) -> int:
    """Return k such that `summands` numbers, divided by 2^k, cannot overflow in their sum."""
    # n·2^-k <= 1 for k = ⌈log2 n⌉: no partial sum, in whatever order, exceeds the largest summand.
    # Scaling by a power of two is exact but for float16's subnormals, below 6.1e-5.
    return math.ceil(math.log2(summands))


def scale_down(total: jax.Array, times: int) -> jax.Array:
    """Divide a float16 by 2^`times`; return any other type unchanged."""
    return total * np.float16(2.0**-times) if total.dtype == np.float16 and times else total


def divide_wide(total: jax.Array, by: jax.Array | int, times: int = 0) -> jax.Array:
    """Return `total / by` in the type of `total`; undo `scale_down` by `times`.

    Computed in float32 or wider: `by` need not fit into float16, or be rounded to bfloat16.
    """
    exact = total.astype(accumulation_dtype(total.dtype))
    # Only a float16 was scaled down; in float32 neither the factor nor the product overflows.
    if total.dtype == np.float16:
        exact = exact * np.float32(2.0**times)
    return (exact / jnp.asarray(by).astype(exact.dtype)).astype(total.dtype)


def make_sendable(array: jax.Array) -> jax.Array:
    """Convert `array` for a collective that keeps its bits; PRNG keys to their data."""
    array = reveal_key(array)
    return array.astype(exact_dtype(array.dtype))


def restore_type(array: jax.Array, like: jax.Array) -> jax.Array:
    """Undo `make_sendable` for an array of the type of `like`."""
    if is_key(like):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return array.astype(like.dtype)


def make_summand(array: jax.Array, recipe: Recipe) -> jax.Array:
    """Convert `array` to a summand: in the wire type, and scaled down if it might overflow."""
    array = array.astype(recipe.wire)
    return array * np.float16(2.0**-recipe.halvings) if recipe.halvings else array


def finish_sum(total: jax.Array, recipe: Recipe) -> jax.Array:
    """Convert the sum to the result, see `scale_sum`; type it as *invariant*."""
    # If the leaf varies over no axis, neither does the sum.
    total = _compat.cast_invariant(total, recipe.axes) if recipe.varying else total
    return scale_sum(total, recipe)


def scale_sum(total: jax.Array, recipe: Recipe) -> jax.Array:
    """Divide or multiply a sum, or a part of it, and cast it to the leaf's type."""
    if recipe.divisor is None:
        return (total * recipe.times if recipe.times > 1 else total).astype(recipe.dtype)
    if recipe.halvings:
        # total = Σ x·2^-k, so the mean is total·(2^k/n): one factor, one rounding, in float32.
        share = np.float32(2.0**recipe.halvings / recipe.divisor)
        return (total.astype(np.float32) * share).astype(recipe.dtype)
    mean = jnp.true_divide(total, recipe.divisor)
    return mean if jnp.issubdtype(recipe.dtype, jnp.integer) else mean.astype(recipe.dtype)
