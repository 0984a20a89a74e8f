"""Error feedback: each replica keeps the rounding error of a sum, and adds it to the next one.

A residual is `Shards` in which every replica has a float32 for each element of the tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.algorithms.coded import Coded, Coding
from jaxcoll._collectives.parts import describe_tree
from jaxcoll._collectives.pipeline import Recipe, unpack
from jaxcoll._collectives.scope import count, resolve_axes, show_axes, show_sizes
from jaxcoll._collectives.shards import Shards, is_shards
from jaxcoll._compression.formats import finite
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import LANES, Pack
from jaxcoll._plan.packs.shard_layout import SummedLayout, first_difference, lay_out_summands
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._show.units import pluralize

_OTHER_WORLD = """\
`{caller}` over {axes} got a residual of {was} over {over}. Convert it through a checkpoint: \
`jc.save_checkpoint` writes the sum over replicas, and `jc.restore_checkpoint` with a new \
`jc.compression.residual` spreads it over the replicas here."""

_WRONG_SHAPE = """\
`{caller}`: expected a residual with an array of shape {expected} on each replica; got {got}. Each \
replica has its own: `jc.data_parallel` passes it that way; for `jax.shard_map` put \
PartitionSpec({axes!r}) in `in_specs`."""

_OTHER_TREE = """\
`{caller}`: the residual belongs to another tree: {difference}. It fits the gradients of the \
parameters that `jc.compression.residual` got: make a new one, or restore the leaf."""

_ALIKE = """\
`all_reduce` with a residual: {leaf} is already the same on every replica along one of the axes. \
Adding each replica's residual would make it differ. Reduce it in another call, without \
`residual`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual(Shards):
    """The residual of a tree: `Shards` in which each part is a summand for the whole tree."""

    def feedback(self, tree: Any, axes: Mapping[str, int], caller: str, prefix: str) -> Feedback:
        """Return this replica's residuals of the leaves of `tree`."""
        layout = self.layout
        if self.axes != tuple(axes) or layout.replicas != count(axes):
            here = " × ".join(show_sizes({name: n}) for name, n in axes.items())
            was, over = pluralize(layout.replicas, "replica"), show_axes(self.axes)
            raise ValueError(_OTHER_WORLD.format(caller=caller, axes=here, was=was, over=over))
        difference = first_difference(layout_like(tree, axes, caller).leaves, layout.leaves)
        if difference:
            raise ValueError(_OTHER_TREE.format(caller=caller, difference=difference))
        owed = {}
        for pack, part in zip(layout.packs, self.parts, strict=True):
            expected, got = (layout.rows(pack), LANES), np.shape(part)
            if got != expected:
                raise ValueError(
                    _WRONG_SHAPE.format(caller=caller, axes=self.axes, expected=expected, got=got)
                )
            # A pack of a residual is one whole leaf, and padding.
            leaf = layout.leaves[pack.segments[0].leaf]
            owed[prefix + leaf.path] = part.reshape(-1)[: leaf.size].reshape(leaf.shape)
        return Feedback(self, owed, prefix)


def is_residual(x: Any) -> bool:
    return isinstance(x, Residual)


def layout_like(tree: Any, axes: Mapping[str, int], caller: str) -> SummedLayout:
    """Return the layout of a tree's residual: a float32 for every element on every replica."""
    # What is in Shards is gathered and scattered exactly.
    tree = jax.tree.map(lambda x: None if is_shards(x) else x, tree, is_leaf=is_shards)
    treedef, leaves = describe_tree(tree, axes, caller)
    return lay_out_summands(treedef, leaves, count(axes))


def zeros(tree: Any, axis_name: str | tuple[str, ...], caller: str) -> Residual:
    """Return this replica's initial residual, zeros, in a program that maps the axis; *varying*."""
    axes = resolve_axes(axis_name, caller)
    layout, names = layout_like(tree, axes, caller), tuple(axes)
    parts = (jnp.zeros((layout.rows(pack), LANES), jnp.float32) for pack in layout.packs)
    return Residual(tuple(_compat.cast_varying(x, names) for x in parts), layout, names)


@dataclasses.dataclass(frozen=True)
class Feedback:
    """This replica's residuals in one sum, and the computation of the next ones."""

    residual: Residual
    owed: Mapping[str, jax.Array]  # the residuals by path; other leaves of the sum have none
    prefix: str

    def add_to(
        self, arrays: Sequence[jax.Array], leaves: Sequence[Leaf], replicas: int
    ) -> list[jax.Array]:
        sent = []
        for array, leaf in zip(arrays, leaves, strict=True):
            owed = self.owed.get(leaf.path)
            if owed is not None and math.prod(leaf.over) != replicas:
                raise ValueError(_ALIKE.format(leaf=where(leaf.path)))
            if owed is not None and jnp.issubdtype(leaf.dtype, np.inexact):
                array = array.astype(leaf.wire) + owed.astype(leaf.wire)
            sent.append(array)
        return sent

    def rounding_error(
        self,
        plan: CollectivePlan,
        pack: Pack,
        total: jax.Array,
        result: jax.Array,
        coded: Coded | None,
        coding: Coding,
    ) -> jax.Array | None:
        """Return the rounding errors of codes and of the cast to the leaf's type; None if exact."""
        if pack.format is None:
            return None
        recipe = cast(Recipe, pack.kind)
        lost = jnp.zeros_like(total, np.float32)
        # All replicas' residuals must add up to the exact sum minus what was returned. The cast to
        # the leaf's type lost total - result·divisor, the same everywhere: each keeps 1/n of it.
        if recipe.dtype != recipe.wire:
            replicas = math.prod(map(lax.axis_size, recipe.over))
            lost = (total - result.astype(recipe.wire) * (recipe.divisor or 1)) / replicas
        if coded is not None:
            lost += algorithms.rounding_error(coded, plan.stages(pack), recipe.axes, coding, total)
        return lost

    def next(
        self,
        plan: CollectivePlan,
        carried: Sequence[tuple[jax.Array, Any]],
        results: Sequence[jax.Array],
    ) -> Residual:
        """Return the next residual; it does not change if a reduced leaf with one is not finite."""
        # Leaves without a residual, such as the loss and metrics, do not matter: a step may apply
        # finite gradients although the loss is not finite.
        both = zip(plan.leaves, results, strict=True)
        with jax.named_scope(f"{plan.name}/finite"):
            is_finite = finite([result for leaf, result in both if leaf.path in self.owed])
        lost = {pack: error for pack, (_, error) in zip(plan.packs, carried, strict=True)}
        coded = {pack: error for pack, error in lost.items() if error is not None}
        errors = unpack(coded.values(), [*coded], plan.leaves, plan.world.platform == "cpu")
        error_of = dict(zip((leaf.path for leaf in plan.leaves), errors, strict=True))
        layout, parts = self.residual.layout, []
        for pack, part in zip(layout.packs, self.residual.parts, strict=True):
            path = self.prefix + layout.leaves[pack.segments[0].leaf].path
            if path in error_of:
                error, owed = error_of[path], self.owed[path]
                # An infinite gradient makes its error NaN: kept, it would spoil every later sum.
                flat = jnp.where(is_finite, 0.0 if error is None else error, owed).reshape(-1)
                part = jnp.pad(flat, (0, part.size - flat.size)).reshape(part.shape)
            parts.append(part)
        return dataclasses.replace(self.residual, parts=tuple(parts))
