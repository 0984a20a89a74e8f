"""One layer's rows: gathered from all replicas, and their gradients reduced back to each one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.choose import choose
from jaxcoll._plan.options import UNSET, ReduceOp
from jaxcoll._plan.packs.automatic import usual
from jaxcoll._plan.packs.leaves import Leaf, carried_dtype
from jaxcoll._plan.packs.packing import Pack, plan_packs
from jaxcoll._plan.packs.shard_layout import ShardedLeaf
from jaxcoll._plan.packs.shard_plan import Half, plan_rows
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.arithmetic import before, divided
from jaxcoll._spmd.axes import count
from jaxcoll._spmd.gather import rows_of_all
from jaxcoll._spmd.pack import pack, unpack
from jaxcoll._spmd.reduce_scatter import recipe_of
from jaxcoll._spmd.scope import Scope

Exchange = Callable[[Sequence[jax.Array]], list[jax.Array]]
"""What one layer's arrays go through, leaf by leaf."""


def gather(
    rows: Mapping[str, Any],
    axes: Mapping[str, int],
    gather_dtype: Any,
    turns: int,
    when: str,
    scope: Scope,
) -> Exchange:
    """From one layer's rows on this replica to those of all replicas, *varying*, though equal.

    Real floating leaves are cast to `gather_dtype` before. For the plan: it happens `turns` times,
    `when` in words.
    """
    leaves = [_leaf(name, x, axes, gather_dtype) for name, x in rows.items()]
    packs, plan = _planned("all_gather", ReduceOp.SUM, leaves, axes, turns, when, scope)

    def gathered(rows: Sequence[jax.Array]) -> list[jax.Array]:
        given = [x.astype(leaf.dtype) for x, leaf in zip(rows, leaves, strict=True)]
        sent = [x.astype(leaf.wire) for x, leaf in zip(given, leaves, strict=True)]
        stages = [plan.stages(planned) for planned in plan.packs]
        wholes = rows_of_all(sent, leaves, packs, stages, tuple(axes), plan.name)
        return [
            lax.collapse(whole, 0, 2).astype(x.dtype)
            for whole, x in zip(cast(list[jax.Array], wholes), given, strict=True)
        ]

    return gathered


def scatter(
    rows: Mapping[str, Any],
    axes: Mapping[str, int],
    reduce_op: ReduceOp,
    gather_dtype: Any,
    turns: int,
    when: str,
    scope: Scope,
) -> Exchange:
    """From the gradients of gathered leaves to this replica's rows of their reduction; *varying*.

    They travel in the types that the leaves were gathered in, and end in the leaves' own.
    """
    world = scope.world(dict(axes))
    leaves, recipes = [], []
    for name, x in rows.items():
        leaf = _leaf(name, x, axes, gather_dtype)
        recipe = recipe_of(leaf, reduce_op, axes, world)
        leaves.append(dataclasses.replace(leaf, wire=recipe.wire))
        recipes.append(dataclasses.replace(recipe, dtype=np.dtype(x.dtype)))
    packs, plan = _planned("reduce_scatter", reduce_op, leaves, axes, turns, when, scope)

    def scattered(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        blocks = [
            before(x, recipe).reshape(world.replicas, *leaf.shape)
            for x, leaf, recipe in zip(gradients, leaves, recipes, strict=True)
        ]
        packed = jax.vmap(lambda each: pack(each, packs, leaves))(blocks)
        totals = []
        for k, (planned, each) in enumerate(zip(plan.packs, packed, strict=True)):
            with jax.named_scope(f"{plan.name}/pack{k}"):
                stages = plan.stages(planned)
                totals.append(algorithms.reduce_scatter(each, stages, tuple(axes)))
        # Divided in the leaf's own type, which may be wider than what travelled.
        summed = cast(list[jax.Array], unpack(totals, packs, leaves))  # a pack carries each
        means = [
            divided(total.astype(recipe.dtype), recipe)
            for total, recipe in zip(summed, recipes, strict=True)
        ]
        return [_compat.as_stored(x) for x in means] if plan.reproducible else means

    return scattered


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
    scope.record(plan)
    return packs, plan


def _leaf(name: str, x: Any, axes: Mapping[str, int], gather_dtype: Any) -> ShardedLeaf:
    dtype = np.dtype(x.dtype)
    if gather_dtype is not None and jax.dtypes.issubdtype(dtype, np.floating):
        dtype = np.dtype(gather_dtype)
    kind = (dtype.name, *sorted(_compat.varying_axes(x)))
    over = tuple(axes.values())
    return ShardedLeaf(name, x.shape, dtype, carried_dtype(dtype), over, kind)
