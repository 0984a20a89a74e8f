"""Error feedback: what replicas owe to a sum, kept by each, and sent with the next.

A residual is `Shards` in which every replica has a float32 for each element of the tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import LANES, Pack
from jaxcoll._plan.packs.shard_layout import SummedLayout, first_difference, summed_layout
from jaxcoll._show.units import counted
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.algorithms.coded import Coded, Coding
from jaxcoll._spmd.parts import sharded_leaves
from jaxcoll._spmd.pipeline import Recipe, unpack
from jaxcoll._spmd.scope import bound_axes, count, listed, named
from jaxcoll._spmd.shards import Shards
from jaxcoll._wire.formats import finite

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual(Shards):
    """The residual of a tree: `Shards` whose parts are summands of all of it."""

    def opened(self, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = "") -> Feedback:
        """Return this replica's residual of each leaf of `tree`."""
        layout = self.layout
        if self.axes != tuple(axes) or layout.replicas != count(axes):
            here = " × ".join(named({name: n}) for name, n in axes.items())
            words = {"was": counted(layout.replicas, "replica"), "over": listed(self.axes)}
            raise ValueError(_OTHER_WORLD.format(caller=caller, axes=here, **words))
        difference = first_difference(layout_like(tree, axes, caller).leaves, layout.leaves)
        if difference:
            raise ValueError(_OTHER_TREE.format(caller=caller, difference=difference))
        owed = {}
        for pack, part in zip(layout.packs, self.parts, strict=True):
            expected, got = (layout.rows(pack), LANES), np.shape(part)
            if got != expected:
                raise ValueError(
                    _NOT_OWN.format(caller=caller, axes=self.axes, expected=expected, got=got)
                )
            leaf = layout.leaves[pack.segments[0].leaf]
            owed[prefix + leaf.path] = part.reshape(-1)[: leaf.size].reshape(leaf.shape)
        return Feedback(self, owed, prefix)


def is_residual(x: Any) -> bool:
    """Return whether `x` is the residual of a tree."""
    return isinstance(x, Residual)


def layout_like(tree: Any, axes: Mapping[str, int], caller: str) -> SummedLayout:
    """Return the layout of a tree's residual: a float32 for every element, on each replica."""
    treedef, leaves = sharded_leaves(tree, axes, caller)
    return summed_layout(treedef, leaves, count(axes))


def zeros(tree: Any, axis_name: str | tuple[str, ...], caller: str) -> Residual:
    """Return this replica's first residual, in a program that maps the axis; *varying*."""
    axes = bound_axes(axis_name, caller)
    layout = layout_like(tree, axes, caller)
    names = tuple(axes)
    parts = [
        _compat.as_varying(jnp.zeros((layout.rows(pack), LANES), jnp.float32), names)
        for pack in layout.packs
    ]
    return Residual(tuple(parts), layout, names)


@dataclasses.dataclass(frozen=True)
class Feedback:
    """What this replica owes to each leaf of one sum, and how what is owed next follows."""

    residual: Residual
    owed: Mapping[str, jax.Array]  # by path; leaves of the sum that are not here owe nothing
    prefix: str

    def added(
        self, arrays: Sequence[jax.Array], leaves: Sequence[Leaf], replicas: int
    ) -> list[jax.Array]:
        """Return the arrays with this replica's residuals."""
        sent = []
        for array, leaf in zip(arrays, leaves, strict=True):
            more = self.owed.get(leaf.path)
            if more is not None and math.prod(leaf.over) != replicas:
                raise ValueError(_ALIKE.format(leaf=where(leaf.path)))
            if more is not None and jnp.issubdtype(leaf.dtype, np.inexact):
                array = array.astype(leaf.wire) + more.astype(leaf.wire)
            sent.append(array)
        return sent

    def lost(
        self,
        plan: CollectivePlan,
        pack: Pack,
        total: jax.Array,
        result: jax.Array,
        coded: Coded | None,
        coding: Coding,
    ) -> jax.Array | None:
        """Return what codes lost, and what the leaf's own type cannot hold of the sum."""
        if pack.format is None:
            return None
        recipe = cast(Recipe, pack.kind)
        lost = jnp.zeros_like(total, np.float32)
        if recipe.dtype != recipe.wire:  # all replicas owe it alike
            replicas = math.prod(map(lax.axis_size, recipe.over))
            lost = (total - result.astype(recipe.wire) * (recipe.divisor or 1)) / replicas
        if coded is not None:
            lost += algorithms.lost(coded, plan.stages(pack), recipe.axes, coding, total)
        return lost

    def next(
        self,
        plan: CollectivePlan,
        carried: Sequence[tuple[jax.Array, Any]],
        results: Sequence[jax.Array],
        on_cpus_along: Collection[str],  # as in `unpack`
    ) -> Residual:
        """Return what is owed next: as it was where what was to be sent is not finite."""
        # A loss or a metric that is not finite says nothing of gradients, which are then applied.
        both = zip(plan.leaves, results, strict=True)
        with jax.named_scope(f"{plan.name}/finite"):
            fine = finite([result for leaf, result in both if leaf.path in self.owed])
        coded = [
            (pack, lost)
            for pack, (_, lost) in zip(plan.packs, carried, strict=True)
            if lost is not None
        ]
        packs, rests = [pack for pack, _ in coded], [lost for _, lost in coded]
        rests = unpack(rests, packs, plan.leaves, on_cpus_along)
        paths = [leaf.path for leaf in plan.leaves]
        left, parts = dict(zip(paths, rests, strict=True)), []
        layout = self.residual.layout
        for pack, part in zip(layout.packs, self.residual.parts, strict=True):
            path = self.prefix + layout.leaves[pack.segments[0].leaf].path
            if path in left:
                rest, owed = left[path], self.owed[path]
                flat = jnp.where(fine, 0.0 if rest is None else rest, owed).reshape(-1)
                part = jnp.pad(flat, (0, part.size - flat.size)).reshape(part.shape)
            parts.append(part)
        return dataclasses.replace(self.residual, parts=tuple(parts))
