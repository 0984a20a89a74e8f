"""The two halves of an all-reduce on trees: each replica's part of the sum, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, carried_dtype, check_reducible, where, wire_dtype
from jaxcoll._plan.packs.shard_layout import ShardLayout, layout_of
from jaxcoll._plan.packs.shard_plan import plan_half
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.world import World
from jaxcoll._show.units import counted
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.arithmetic import Recipe, before, divided
from jaxcoll._spmd.axes import bound_axes, count
from jaxcoll._spmd.pack import pack
from jaxcoll._spmd.reduce import hiding_axis
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.shards import Shards, blocks_of, check_fits, sharded_leaves, tree_of, whole_of

_ALREADY_REDUCED = """\
`reduce_scatter` over {axes}: {leaf} is already the same on every replica, so reducing it again \
would count it {n} times. What probably happened: autodiff has summed this gradient already, \
because its parameter enters a checked `shard_map` replicated. Take the gradient with \
`jc.value_and_grad(..., scatter=True)`, which sums it once and leaves each replica its part; or, \
if it is the mean already, give it to the optimizer's `update` with `reduced=True`."""


def reduce_scatter(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    scope: Scope,
    layout: ShardLayout | None = None,
) -> Shards:
    """This replica's part of the reduced tree; see `jc.reduce_scatter`.

    Args:
      reduce_op: SUM or MEAN.
      value: a pytree of arrays.
      axis_name: one axis, or several, outer first.
      scope: options, world, and who wants to know.
      layout: where the elements go; None: as the options say.

    Returns:
      This replica's shards, *varying*.

    Raises:
      NameError: an axis is not bound here.
      ValueError: a leaf cannot be reduced or cut, the tree is not the layout's, or the options do
        not fit.
      AlreadyReducedError: a leaf is the same on every replica already.
    """
    axes = bound_axes(axis_name, "reduce_scatter")
    world = scope.world(axes)
    treedef, found = sharded_leaves(value, axes, "reduce_scatter")
    arrays = [jnp.asarray(x) for x in treedef.flatten_up_to(value)]
    for leaf, array in zip(found, arrays, strict=True):
        if array.size:
            _check_varies(leaf.path, array, axes)
    recipes = [_recipe(leaf, reduce_op, axes, world) for leaf in found]
    if layout is not None:
        check_fits(layout, treedef, found, count(axes), "reduce_scatter")
    plan, layout = plan_scatter(treedef, found, reduce_op, axes, world, scope, layout)
    scope.record(plan)
    parts = []
    for k, (planned, packed) in enumerate(
        zip(plan.packs, pack(arrays, layout.packs, layout.leaves), strict=True)
    ):
        recipe = recipes[planned.segments[0].leaf]
        with jax.named_scope(f"{plan.name}/pack{k}"):
            blocks = blocks_of(before(packed, recipe), layout, k)
            total = algorithms.reduce_scatter(blocks, plan.stages(planned), tuple(axes))
            part = divided(total, recipe)
            parts.append(_compat.as_stored(part) if plan.reproducible and recipe.divisor else part)
    return Shards(tuple(parts), layout, tuple(axes))


def plan_scatter(
    treedef: Any,
    found: Sequence[Leaf],
    reduce_op: ReduceOp,
    axes: Mapping[str, int],
    world: World,
    scope: Scope,
    layout: ShardLayout | None = None,
) -> tuple[Plan, ShardLayout]:
    """The plan of a `reduce_scatter`, and where its results lie.

    Args:
      treedef: the tree's structure.
      found: its leaves, as `sharded_leaves` has them.
      reduce_op: SUM or MEAN.
      axes: names and sizes, outer first.
      world: where it runs.
      scope: options and terms.
      layout: where the elements go; None: as the options say.

    Raises:
      ValueError: a leaf cannot be reduced, or the options do not fit.
    """
    recipes = [_recipe(leaf, reduce_op, axes, world) for leaf in found]
    results = [_result_dtype(recipe) for recipe in recipes]
    if layout is None:
        ends = tuple(
            dataclasses.replace(leaf, dtype=dtype, wire=dtype)
            for leaf, dtype in zip(found, results, strict=True)
        )
        layout = layout_of(treedef, ends, count(axes), scope.options.bytes_per_pack)
    leaves = [
        dataclasses.replace(leaf, wire=recipe.wire)
        for leaf, recipe in zip(layout.leaves, recipes, strict=True)
    ]
    terms = scope.terms(world)
    return (
        plan_half("reduce_scatter", reduce_op, layout, leaves, scope.options, world, terms),
        layout,
    )


def all_gather(shards: Shards, axis_name: str | tuple[str, ...], *, scope: Scope) -> Any:
    """The tree that `shards` are the parts of; see `jc.all_gather`.

    Args:
      shards: this replica's.
      axis_name: the axes that they were made over.
      scope: options, world, and who wants to know.

    Returns:
      The whole tree, *invariant*.

    Raises:
      NameError: an axis is not bound here.
      ValueError: they were made over other axes, or for another number of replicas.
    """
    axes = bound_axes(axis_name, "all_gather")
    layout = shards.layout
    if tuple(axes) != shards.axes or count(axes) != layout.replicas:
        raise ValueError(
            f"`all_gather` over {_named(axes)} got Shards of "
            f"{counted(layout.replicas, 'replica')} over {', '.join(map(repr, shards.axes))}; "
            "gather them over the axes they were made over."
        )
    world = scope.world(axes)
    plan = plan_half(
        "all_gather", ReduceOp.SUM, layout, layout.leaves, scope.options, world, scope.terms(world)
    )
    scope.record(plan)
    wholes = []
    for k, (planned, part) in enumerate(zip(plan.packs, shards.parts, strict=True)):
        with jax.named_scope(f"{plan.name}/pack{k}"):
            sent = _compat.as_varying(part.astype(carried_dtype(part.dtype)), tuple(axes))
            blocks = algorithms.all_gather(sent, plan.stages(planned), tuple(axes))
            wholes.append(whole_of(blocks.astype(part.dtype), layout, k))
    hidden = hiding_axis(axes) if world.platform == "cpu" else None
    return scope.vouched(tree_of(wholes, layout, hidden), axes)


def _recipe(leaf: Leaf, reduce_op: ReduceOp, axes: Mapping[str, int], world: World) -> Recipe:
    check_reducible(leaf.path, leaf.dtype, "reduce_scatter")
    over = tuple(a for a, n in axes.items() if n > 1)
    wire = wire_dtype(leaf.dtype, reduce_op, world)
    divisor = count(axes) if reduce_op is ReduceOp.MEAN else None
    return Recipe(over, tuple(axes), frozenset(), leaf.dtype, wire, 1, divisor)


def _result_dtype(recipe: Recipe) -> np.dtype:
    wired = jax.ShapeDtypeStruct((), recipe.wire)
    return np.dtype(jax.eval_shape(lambda x: divided(x, recipe), wired).dtype)


def _check_varies(path: str, array: jax.Array, axes: dict[str, int]) -> None:
    varying = _compat.varying_axes(array)
    missing = {a: n for a, n in axes.items() if a not in varying and _compat.tracks_variance(a)}
    if missing:
        raise AlreadyReducedError(
            _ALREADY_REDUCED.format(axes=_named(axes), leaf=where(path), n=count(missing))
        )


def _named(axes: dict[str, int]) -> str:
    return ", ".join(f"{name!r} (size {size})" for name, size in axes.items())
