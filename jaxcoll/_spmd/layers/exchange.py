"""One layer's rows: gathered from all replicas, and their gradients reduced back to each one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.choose import choose
from jaxcoll._plan.options import UNSET, ReduceOp
from jaxcoll._plan.packs.automatic import usual
from jaxcoll._plan.packs.leaves import Leaf, carried_dtype, wire_dtype
from jaxcoll._plan.packs.packing import Pack, plan_packs
from jaxcoll._plan.packs.shard_layout import ShardedLeaf
from jaxcoll._plan.packs.shard_plan import Half, plan_rows
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.arithmetic import Recipe, before, divided
from jaxcoll._spmd.axes import count
from jaxcoll._spmd.pack import pack, unpack
from jaxcoll._spmd.scope import Scope

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Gather:
    """One layer's rows of leaves that are cut over the same axes, from all replicas.

    Attributes:
      axes: outer first.
      leaves: this replica's rows of each leaf, with the types that they travel in.
      packs: of these rows.
      plan: of the gather.
    """

    axes: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    packs: tuple[Pack, ...]
    plan: Plan

    def __call__(self, rows: Sequence[jax.Array]) -> Arrays:
        """Every replica's rows of each leaf, one after another; *varying*, though equal."""
        given = [x.astype(leaf.dtype) for x, leaf in zip(rows, self.leaves, strict=True)]
        sent = [x.astype(leaf.wire) for x, leaf in zip(given, self.leaves, strict=True)]
        found = []
        plans = zip(self.plan.packs, pack(sent, self.packs, self.leaves), strict=True)
        for k, (planned, packed) in enumerate(plans):
            with jax.named_scope(f"{self.plan.name}/pack{k}"):
                blocks = algorithms.all_gather(packed, self.plan.stages(planned), self.axes)
                found.append(_compat.as_varying(blocks, self.axes))
        wholes = jax.vmap(lambda each: _unpacked(each, self.packs, self.leaves))(found)
        return [
            lax.collapse(whole, 0, 2).astype(x.dtype)
            for whole, x in zip(wholes, given, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Scatter:
    """The gradients of one layer's gathered leaves, reduced back to each replica's rows.

    Attributes:
      axes: outer first.
      leaves: this replica's rows of each leaf, with the types that they travel in.
      packs: of these rows.
      recipes: how each leaf's gradient is reduced.
      plan: of the reduce-scatter.
    """

    axes: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    packs: tuple[Pack, ...]
    recipes: tuple[Recipe, ...]
    plan: Plan

    def __call__(self, gradients: Sequence[jax.Array]) -> Arrays:
        """This replica's rows of the reduced gradients, in the leaves' own types; *varying*."""
        blocks = [
            before(x, recipe).reshape(self.plan.world.replicas, *leaf.shape)
            for x, leaf, recipe in zip(gradients, self.leaves, self.recipes, strict=True)
        ]
        packed = jax.vmap(lambda each: pack(each, self.packs, self.leaves))(blocks)
        totals = []
        for k, (planned, each) in enumerate(zip(self.plan.packs, packed, strict=True)):
            with jax.named_scope(f"{self.plan.name}/pack{k}"):
                stages = self.plan.stages(planned)
                totals.append(algorithms.reduce_scatter(each, stages, self.axes))
        rows = _unpacked(totals, self.packs, self.leaves)
        # Divided in the leaf's own type, which may be wider than what travelled.
        means = [
            divided(total.astype(recipe.dtype), recipe)
            for total, recipe in zip(rows, self.recipes, strict=True)
        ]
        return [_compat.as_stored(x) for x in means] if self.plan.reproducible else means


def _unpacked(packed: Sequence[jax.Array], packs: Sequence[Pack], leaves: Sequence[Leaf]) -> Arrays:
    """The leaves, every one of which a pack carries."""
    return cast(Arrays, unpack(packed, packs, leaves))


def gather(
    rows: Mapping[str, Any],
    axes: Mapping[str, int],
    gather_dtype: Any,
    turns: int,
    when: str,
    scope: Scope,
) -> Gather:
    """How one layer's rows are gathered over `axes`.

    Args:
      rows: types of this replica's, by name; none is empty.
      axes: outer first.
      gather_dtype: what real floating leaves are cast to before; None: nothing.
      turns: how often it happens, for the plan.
      when: in words, likewise.
      scope: options and world.

    Raises:
      ValueError: the options ask for what a half cannot do, or does not fit the axes.
    """
    leaves = [_leaf(name, x, axes, gather_dtype) for name, x in rows.items()]
    packs, plan = _planned("all_gather", ReduceOp.SUM, leaves, axes, turns, when, scope)
    return Gather(tuple(axes), tuple(leaves), packs, plan)


def scatter(
    rows: Mapping[str, Any],
    axes: Mapping[str, int],
    reduce_op: ReduceOp,
    gather_dtype: Any,
    turns: int,
    when: str,
    scope: Scope,
) -> Scatter:
    """How the gradients of such rows are reduced, in the types that they were gathered in."""
    world = scope.world(dict(axes))
    over = tuple(a for a, n in axes.items() if n > 1)
    divisor = count(axes) if reduce_op is ReduceOp.MEAN else None
    leaves, recipes = [], []
    for name, x in rows.items():
        leaf = _leaf(name, x, axes, gather_dtype)
        wire = wire_dtype(leaf.dtype, reduce_op, world)
        leaves.append(dataclasses.replace(leaf, wire=wire))
        recipes.append(Recipe(over, tuple(axes), frozenset(), np.dtype(x.dtype), wire, 1, divisor))
    packs, plan = _planned("reduce_scatter", reduce_op, leaves, axes, turns, when, scope)
    return Scatter(tuple(axes), tuple(leaves), packs, tuple(recipes), plan)


def _planned(
    half: Half,
    reduce_op: ReduceOp,
    leaves: Sequence[Leaf],
    axes: Mapping[str, int],
    turns: int,
    when: str,
    scope: Scope,
) -> tuple[tuple[Pack, ...], Plan]:
    """The packs of this replica's rows, and the plan of what carries all replicas'."""
    world, n = scope.world(dict(axes)), count(axes)
    packing = choose(scope.options.replace(shards=UNSET), world).packing or usual(world)
    packs = plan_packs(leaves, packing)
    whole = [dataclasses.replace(x, shape=(n * x.shape[0], *x.shape[1:])) for x in leaves]
    plan = plan_rows(
        half, reduce_op, whole, packs, scope.options, world, scope.terms(world), turns, when
    )
    return packs, plan


def _leaf(name: str, x: Any, axes: Mapping[str, int], gather_dtype: Any) -> ShardedLeaf:
    dtype = np.dtype(x.dtype)
    if gather_dtype is not None and jax.dtypes.issubdtype(dtype, np.floating):
        dtype = np.dtype(gather_dtype)
    kind = (dtype.name, *sorted(_compat.varying_axes(x)))
    over = tuple(axes.values())
    return ShardedLeaf(name, x.shape, dtype, carried_dtype(dtype), over, kind)
