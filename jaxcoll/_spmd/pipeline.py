"""The one way by which trees travel: a plan's packs, made of leaves, carried, and cut up again.

A collective is a description of it: how a pack enters, what carries it, how it leaves. Around a sum
stands its arithmetic: the type it travels in, a mean's division, the type it ends in.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.packs.leaves import Leaf, carried_dtype
from jaxcoll._plan.packs.packing import Pack


def pack(
    arrays: Sequence[jax.Array],
    packs: Sequence[Pack],
    leaves: Sequence[Leaf | jax.Array],
    elements: Callable[[Pack], int] | None = None,
) -> list[jax.Array]:
    """Return one array for each pack, with zeros behind it up to its `elements`.

    A pack of one whole leaf is that leaf, in its own shape and without a copy; any other is
    flat. `unpack(pack(arrays, packs, leaves), packs, leaves)` is `arrays`, to the bit (but for
    the sign and payload of a bfloat16 or 8-bit NaN, which XLA's CPU compiler does not keep).
    """
    flat: dict[int, jax.Array] = {}

    def piece(leaf: int, start: int, size: int) -> jax.Array:
        if leaf not in flat:
            flat[leaf] = arrays[leaf].reshape(-1)
        whole = size == arrays[leaf].size
        return flat[leaf] if whole else flat[leaf][start : start + size]

    def joined(p: Pack) -> jax.Array:
        *lengths, last = p.lengths
        lengths.append(max(last, elements(p) - sum(lengths)) if elements else last)
        pieces = zip(p.segments, lengths, strict=True)
        return jnp.concatenate([_filled(piece(s.leaf, s.start, s.size), k) for s, k in pieces])

    return [arrays[p.segments[0].leaf] if p.is_leaf(leaves) else joined(p) for p in packs]


def _filled(piece: jax.Array, length: int) -> jax.Array:
    """`piece` with zeros behind it."""
    return jnp.pad(piece, (0, length - piece.size)) if length > piece.size else piece


def carry_out(
    plan: CollectivePlan,
    packed: Iterable[Any],
    carry: Callable[[Pack, Any], Any],  # the collective
    *,
    enter: Callable[[Pack, Any], Any] = lambda _, array: array,  # what travels of a packed array
    leave: Callable[[Pack, Any], Any] = lambda _, array: array,  # the result of what arrived
) -> list[Any]:
    """Return the results of the packs of `plan`, each under its name in the program."""
    carried: list[Any] = []
    for k, (pack, array) in enumerate(zip(plan.packs, packed, strict=True)):
        with jax.named_scope(f"{plan.name}/pack{k}"):
            array = enter(pack, array)
            if plan.chained and carried:
                array = _compat.ordered(array, after=jax.tree.leaves(carried[-1])[0])
            carried.append(carry(pack, array))
    # Apart, so that no pack waits for what becomes of the one before.
    results = []
    for k, (pack, array) in enumerate(zip(plan.packs, carried, strict=True)):
        with jax.named_scope(f"{plan.name}/pack{k}"):
            results.append(leave(pack, array))
    return results


def unpack(
    packed: Iterable[jax.Array],
    packs: Sequence[Pack],
    leaves: Sequence[Leaf | jax.Array],
    on_cpus_along: Collection[str] = (),
) -> list[jax.Array | None]:
    """Return the leaves, in their order and shapes; None for those that no pack carries.

    XLA's CPU compiler makes a kernel, some 6 ms each, for every static slice, but compiles slices
    of one shape once if their offsets are data: as those that depend on the index of one of the
    mapped axes `on_cpus_along`, which the compiler does not know. Without, they are static and fuse
    best.
    """
    pieces: dict[int, list[jax.Array]] = {}
    for array, pack in zip(packed, packs, strict=True):
        if pack.is_leaf(leaves):
            pieces[pack.segments[0].leaf] = [array]
            continue
        for s, piece in zip(pack.segments, _cut(array, pack, on_cpus_along), strict=True):
            pieces.setdefault(s.leaf, []).append(piece)
    result: list[jax.Array | None] = []
    for i, leaf in enumerate(leaves):
        if i not in pieces:
            result.append(None)
            continue
        whole = pieces[i][0] if len(pieces[i]) == 1 else jnp.concatenate(pieces[i])
        result.append(whole if whole.shape == leaf.shape else whole.reshape(leaf.shape))
    return result


def _cut(array: jax.Array, pack: Pack, axes: Collection[str]) -> list[jax.Array]:
    """Return the pieces of a pack, one after another."""
    alike = Counter(s.size for s in pack.segments)
    zero = None
    fits = array.size <= np.iinfo(np.int32).max  # an offset that is data
    mapped = (a for a in axes if fits and lax.axis_size(a) > 1 and not _compat.is_vmapped(a))
    for axis in itertools.islice(mapped, 1):
        # Zero, as no compiler knows: the axis's index has no sign bit.
        index = _compat.as_invariant(lax.axis_index(axis), (axis,))
        zero = lax.shift_right_logical(index, np.int32(31))
    pieces, offset = [], 0
    for s, length in zip(pack.segments, pack.lengths, strict=True):
        if zero is None or alike[s.size] == 1:
            pieces.append(array[offset : offset + s.size])
        else:
            # A constant of two numbers is an argument of the kernel; one number would be inlined.
            start = lax.dynamic_index_in_dim(
                np.array([offset, -1], np.int32), zero, keepdims=False, allow_negative_indices=False
            )
            pieces.append(
                lax.dynamic_slice(array, (start,), (s.size,), allow_negative_indices=False)
            )
        offset += length
    return pieces


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arithmetic of a leaf's reduction; two leaves share a pack if it is equal."""

    # Axes the sum is over, those of size one left out; empty: nothing travels
    over: tuple[str, ...]
    axes: tuple[str, ...]  # all axes of the reduction, over which the result is invariant
    # Every axis that the leaf varies over, so that packing gives none a wider type
    varying: frozenset[str]
    dtype: np.dtype  # the leaf's type
    wire: np.dtype  # the type it travels and is summed in
    times: int  # what a sum is multiplied by: the replicas that hold the same value
    divisor: int | None  # what makes a mean of the sum; None for a sum

    @property
    def halvings(self) -> int:
        """Powers of two taken off a float16 before a mean, so that no partial sum overflows."""
        if self.divisor is None or self.wire != np.float16 or not self.over:
            return 0
        return halvings(self.divisor)


def halvings(summands: int) -> int:
    """Powers of two to take off so many numbers before a mean, so that no partial sum overflows."""
    return math.ceil(math.log2(summands))


def halved(total: jax.Array, times: int) -> jax.Array:
    """A float16 with so many powers of two taken off; anything else as it is."""
    return total * np.float16(2.0**-times) if total.dtype == np.float16 and times else total


def quotient(total: jax.Array, by: jax.Array | int, times: int = 0) -> jax.Array:
    """`total / by` in the type of `total`, computed in float32 or wider.

    Neither does a count have to fit into float16, nor is it rounded to eight bits for bfloat16.
    """
    exact = total.astype(wide(total.dtype))
    if total.dtype == np.float16:
        exact = exact * np.float32(2.0**times)
    return (exact / jnp.asarray(by).astype(exact.dtype)).astype(total.dtype)


def sent(array: jax.Array) -> jax.Array:
    """`array` as it travels unchanged: of PRNG keys their data, in whole bytes."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return array.astype(carried_dtype(array.dtype))


def received(array: jax.Array, like: jax.Array) -> jax.Array:
    """Undo `sent` of arrays of the type of `like`."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return array.astype(like.dtype)


def before(array: jax.Array, recipe: Recipe) -> jax.Array:
    """`array` as it travels."""
    array = array.astype(recipe.wire)
    return array * np.float16(2.0**-recipe.halvings) if recipe.halvings else array


def after(total: jax.Array, recipe: Recipe) -> jax.Array:
    """The sum made the result: divided or multiplied, in its own type, *invariant*."""
    # The sum of what varies over no axis varies over none.
    total = _compat.as_invariant(total, recipe.axes) if recipe.varying else total
    return divided(total, recipe)


def divided(total: jax.Array, recipe: Recipe) -> jax.Array:
    """The sum, or a part of it, made the result, varying as it does."""
    if recipe.divisor is None:
        return (total * recipe.times if recipe.times > 1 else total).astype(recipe.dtype)
    if recipe.halvings:
        share = np.float32(2.0**recipe.halvings / recipe.divisor)
        return (total.astype(np.float32) * share).astype(recipe.dtype)
    mean = jnp.true_divide(total, recipe.divisor)  # of integers: a float of JAX's choice
    return mean if jnp.issubdtype(recipe.dtype, jnp.integer) else mean.astype(recipe.dtype)


def wide(dtype: np.dtype) -> np.dtype:
    """The type in which numbers of `dtype` are added up locally: a float of at least 32 bits."""
    if jnp.issubdtype(dtype, np.complexfloating) or dtype == np.float64:
        return dtype
    return np.dtype(np.float32)
