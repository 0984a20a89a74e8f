"""Error feedback: what replicas owe to a sum, kept by each, and sent with the next.

A residual is `Shards` in which every replica has a float32 for each element of the tree.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.algorithms import format_of
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.shard_layout import LANES, SummedLayout, first_difference, summed_layout
from jaxcoll._show.units import counted
from jaxcoll._spmd.arithmetic import Recipe, finite
from jaxcoll._spmd.axes import bound_axes, count, listed, named
from jaxcoll._spmd.parts import sharded_leaves
from jaxcoll._spmd.pipeline import unpack
from jaxcoll._spmd.shards import Shards, is_shards

_NO_RESIDUAL = """\
`{caller}` expects what `jc.compression.residual(params)` returns as its residual, or what this \
call returned the last time; got {got}."""

_OTHER_WORLD = """\
`{caller}` over {axes} got a residual of {was} over {over}. Restore its sum for the replicas that \
there are: `jc.save_checkpoint` writes it, and `jc.restore_checkpoint` with a new \
`jc.compression.residual` deals it out."""

_NOT_OWN = """\
`{caller}`: a residual has an array of shape {expected} on each replica here, and got {got}. Each \
replica has its own: `jc.data_parallel` passes it so; give `jax.shard_map` \
PartitionSpec({axes!r}) for it in `in_specs`."""

_OTHER_TREE = """\
`{caller}`: the residual is of another tree: {difference}. It belongs to the gradients of the \
parameters that `jc.compression.residual` was given: make a new one, or bring the leaf back."""

_ALIKE = """\
`all_reduce` with a residual: {leaf} is already the same on every replica along one of the axes, \
where each replica's own residual would make it differ. Reduce it in a call of its own, without \
`residual`."""


def is_residual(x: Any) -> bool:
    """Return whether `x` is the residual of a tree."""
    return is_shards(x) and isinstance(x.layout, SummedLayout)


def layout_like(tree: Any, axes: Mapping[str, int], caller: str) -> SummedLayout:
    """Return the layout of a tree's residual: a float32 for every element, on each replica."""
    treedef, leaves = sharded_leaves(tree, axes, caller)
    return summed_layout(treedef, leaves, count(axes))


def zeros(tree: Any, axis_name: str | tuple[str, ...], caller: str) -> Shards:
    """Return this replica's first residual, in a program that maps the axis; *varying*."""
    axes = bound_axes(axis_name, caller)
    layout = layout_like(tree, axes, caller)
    names = tuple(axes)
    parts = [
        _compat.as_varying(jnp.zeros((layout.rows(pack), LANES), jnp.float32), names)
        for pack in layout.packs
    ]
    return Shards(tuple(parts), layout, names)


def opened(
    residual: Any, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = ""
) -> dict[str, jax.Array]:
    """Return this replica's residual of each leaf, by the leaf's path in `tree` behind `prefix`."""
    if not is_residual(residual):
        raise ValueError(_NO_RESIDUAL.format(caller=caller, got=type(residual).__name__))
    layout = residual.layout
    if residual.axes != tuple(axes) or layout.replicas != count(axes):
        raise ValueError(
            _OTHER_WORLD.format(
                caller=caller,
                axes=" × ".join(named({name: n}) for name, n in axes.items()),
                was=counted(layout.replicas, "replica"),
                over=listed(residual.axes),
            )
        )
    difference = first_difference(layout_like(tree, axes, caller).leaves, layout.leaves)
    if difference:
        raise ValueError(_OTHER_TREE.format(caller=caller, difference=difference))
    owed = {}
    for pack, part in zip(layout.packs, residual.parts, strict=True):
        expected, got = (layout.rows(pack), LANES), np.shape(part)
        if got != expected:
            raise ValueError(
                _NOT_OWN.format(caller=caller, axes=residual.axes, expected=expected, got=got)
            )
        leaf = layout.leaves[pack.segments[0].leaf]
        owed[prefix + leaf.path] = part.reshape(-1)[: leaf.size].reshape(leaf.shape)
    return owed


def closed(residual: Shards, owed: Mapping[str, jax.Array], prefix: str = "") -> Shards:
    """Return the residual with the leaves of `owed`, by their paths, in their places."""
    parts = []
    for pack, part in zip(residual.layout.packs, residual.parts, strict=True):
        leaf = residual.layout.leaves[pack.segments[0].leaf]
        new = owed.get(prefix + leaf.path)
        if new is not None:
            part = jnp.pad(new.reshape(-1), (0, part.size - leaf.size)).reshape(part.shape)
        parts.append(part)
    return dataclasses.replace(residual, parts=tuple(parts))


def with_owed(
    arrays: Sequence[jax.Array], leaves: Sequence[Leaf], owed: Mapping[str, jax.Array], n: int
) -> list[jax.Array]:
    """Add this replica's residuals to the arrays, in the types of sums over all `n`."""
    sent = []
    for array, leaf in zip(arrays, leaves, strict=True):
        more = owed.get(leaf.path)
        if more is not None and math.prod(leaf.over) != n:
            raise ValueError(_ALIKE.format(leaf=where(leaf.path)))
        if more is not None and jnp.issubdtype(leaf.dtype, np.inexact):
            array = array.astype(leaf.wire) + more.astype(leaf.wire)
        sent.append(array)
    return sent


def cut_off(total: jax.Array, result: jax.Array, recipe: Recipe) -> jax.Array:
    """Return what the leaf's own type cannot hold of a sum, which all replicas owe alike."""
    if recipe.dtype == recipe.wire:
        return jnp.zeros_like(total, np.float32)
    replicas = math.prod(map(lax.axis_size, recipe.over))
    return (total - result.astype(recipe.wire) * (recipe.divisor or 1)) / replicas


def left(
    owed: Mapping[str, jax.Array],
    plan: CollectivePlan,
    carried: Sequence[tuple[jax.Array, Any]],  # reduced packs, and what coding each of them lost
    results: Sequence[jax.Array],  # the reduced leaves
    hidden: str | None,  # as in `unpack`
) -> dict[str, jax.Array]:
    """Return what is owed next, by path: as it was where what was to be sent is not finite."""
    # A loss or a metric that is not finite says nothing of gradients, which are then applied.
    alone = [
        result
        for leaf, result in zip(plan.leaves, results, strict=True)
        if leaf.path in owed and not leaf.travels
    ]
    with jax.named_scope(f"{plan.name}/finite"):
        fine = finite([*_sent(owed, plan, [total for total, _ in carried]), *alone])
    lost = zip(plan.packs, carried, strict=True)
    coded = [(pack, x) for pack, (_, x) in lost if x is not None]
    rests = unpack(
        [x for _, x in coded], [p for p, _ in coded], plan.leaves, one_kernel_a_shape=hidden
    )
    return {
        leaf.path: jnp.where(fine, 0.0 if rest is None else rest, owed[leaf.path])
        for leaf, rest in zip(plan.leaves, rests, strict=True)
        if leaf.path in owed
    }


def _sent(
    owed: Mapping[str, jax.Array], plan: CollectivePlan, packs: Sequence[jax.Array]
) -> Iterator[jax.Array]:
    """Yield the parts of reduced packs that leaves with a residual have, neighbours together."""
    for pack, total in zip(plan.packs, packs, strict=True):
        format = format_of(plan.stages(pack))
        if format is not None and total.dtype == pack.dtype:
            # All leaves in it have a residual, and a block that is not finite is so everywhere.
            yield total.reshape(-1)[:: format.block]
            continue
        start = 0
        pieces = zip(pack.segments, pack.lengths, strict=True)
        for owing, run in itertools.groupby(
            pieces, key=lambda piece: plan.leaves[piece[0].leaf].path in owed
        ):
            size = sum(length for _, length in run)
            if owing:
                alone = len(pack.segments) == 1 or size == total.size
                yield total if alone else total[start : start + size]
            start += size
