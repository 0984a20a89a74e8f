"""The two halves of an all-reduce on trees: each replica's part of the sum, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, carried_dtype, check_reducible, wire_dtype
from jaxcoll._plan.packs.shard_layout import ShardLayout, SummedLayout, layout_of
from jaxcoll._plan.packs.shard_plan import plan_half
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.world import World
from jaxcoll._show.units import counted
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.arithmetic import Recipe, before, divided
from jaxcoll._spmd.axes import already_reduced, bound_axes, count, listed, named
from jaxcoll._spmd.pack import pack
from jaxcoll._spmd.reduce import hiding_axis
from jaxcoll._spmd.scope import Scope, retyped
from jaxcoll._spmd.shards import Shards, blocks_of, check_fits, leaves_of, sharded_leaves, whole_of

_REDUCED = """\
If it is the mean already, give it to the optimizer's `update` with `reduced=True`."""

_SUMMED = """\
take it with `jc.value_and_grad(..., scatter=True)`, which sums it once and leaves each replica \
its part."""


def reduce_scatter(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    scope: Scope,
    layout: ShardLayout | None = None,
) -> Shards:
    """This replica's part of the reduced tree, laid out by `layout`; see `jc.reduce_scatter`."""
    axes = bound_axes(axis_name, "reduce_scatter")
    world = scope.world(axes)
    treedef, found = sharded_leaves(value, axes, "reduce_scatter")
    arrays = [_compat.terms_of_sum(jnp.asarray(x), axes) for x in treedef.flatten_up_to(value)]
    for leaf, array in zip(found, arrays, strict=True):
        same = {a: axes[a] for a in _compat.same_axes(array, axes)}
        if same and array.size:
            raise already_reduced(
                "reduce_scatter", leaf.path, array, axes, same, value=_REDUCED, gradient=_SUMMED
            )
    recipes = [recipe_of(leaf, reduce_op, axes, world) for leaf in found]
    if layout is not None:
        check_fits(layout, treedef, found, count(axes), "reduce_scatter")
    plan, layout = plan_scatter(treedef, found, reduce_op, axes, world, scope, layout)
    scope.record(plan)
    parts = _scattered(arrays, plan, layout, recipes, axes)
    parts = tuple(marks.part_of_sum(part, tuple(axes)) for part in parts)
    return Shards(parts, layout, tuple(axes))


def _scattered(
    arrays: Sequence[jax.Array],
    plan: Plan,
    layout: ShardLayout,
    recipes: Sequence[Recipe],
    axes: Mapping[str, int],
) -> tuple[jax.Array, ...]:
    """This replica's part of each pack of the reduced leaves."""
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
    return tuple(parts)


def plan_scatter(
    treedef: Any,
    found: Sequence[Leaf],
    reduce_op: ReduceOp,
    axes: Mapping[str, int],
    world: World,
    scope: Scope,
    layout: ShardLayout | None = None,
) -> tuple[Plan, ShardLayout]:
    """The plan of a `reduce_scatter` of the leaves `found`, and the layout of its results."""
    recipes = [recipe_of(leaf, reduce_op, axes, world) for leaf in found]
    results = [_result_dtype(recipe) for recipe in recipes]
    if layout is None:
        ends = tuple(
            dataclasses.replace(leaf, dtype=dtype, wire=dtype)
            for leaf, dtype in zip(found, results, strict=True)
        )
        layout = layout_of(treedef, ends, count(axes), scope.options.bytes_per_pack)
    leaves = wired(layout.leaves, recipes)
    plan = plan_half("reduce_scatter", reduce_op, layout.packs, leaves, scope.options, world)
    return plan, layout


def all_gather(shards: Shards, axis_name: str | tuple[str, ...], *, scope: Scope) -> Any:
    """The whole tree that `shards` are the parts of, *invariant*; see `jc.all_gather`."""
    axes = bound_axes(axis_name, "all_gather")
    layout = shards.layout
    if tuple(axes) != shards.axes or count(axes) != layout.replicas:
        raise ValueError(
            f"`all_gather` over {named(axes)} got Shards of "
            f"{counted(layout.replicas, 'replica')} over {listed(shards.axes)}; "
            "gather them over the axes they were made over."
        )
    if isinstance(layout, SummedLayout):
        raise ValueError(
            "`all_gather` got a residual, which every replica has for all of the tree: there is "
            "nothing to gather. `jc.unshard` makes its sum between programs."
        )
    if shards.stack:
        raise ValueError(
            f"`all_gather` got Shards of {shards.stack[0]} stacked layers, all of which no device "
            "has room for: gather each layer where it is used, in the body of a `lax.scan` over "
            "these Shards or by `jc.scan_layers`; between programs `jc.unshard` makes the tree."
        )
    parts = [_compat.as_varying(x, tuple(axes)) for x in shards.parts]
    found = _gather_of(layout, shards.leaves, axes, scope)(parts)
    if not retyped().issuperset(axes):
        found = [_compat.as_invariant(x, tuple(axes), summed=True) for x in found]
    found = marks.same(found, tuple(axes))
    return jax.tree_util.tree_unflatten(layout.treedef, found)  # pyright: ignore[reportArgumentType]


def _gather_of(
    layout: ShardLayout, leaves: Sequence[Leaf], axes: Mapping[str, int], scope: Scope
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """From parts to leaves, *varying*; its derivative reduce-scatters their cotangents, as a SUM.

    What JAX makes of the gather's own derivative sends as much, but adds up as many padded packs
    as there are leaves, and no plan shows it.
    """
    world = scope.world(dict(axes))
    asked = (scope.options, world)
    plan = plan_half("all_gather", ReduceOp.SUM, layout.packs, leaves, *asked)
    scope.record(plan)

    def gathered(parts: list[jax.Array]) -> list[jax.Array]:
        wholes = []
        for k, (planned, part) in enumerate(zip(plan.packs, parts, strict=True)):
            with jax.named_scope(f"{plan.name}/pack{k}"):
                sent = part.astype(carried_dtype(part.dtype))
                blocks = algorithms.all_gather(sent, plan.stages(planned), tuple(axes))
                wholes.append(whole_of(blocks.astype(part.dtype), layout, k))
        wholes = _compat.at_once(wholes) if world.over_gloo else wholes
        return leaves_of(wholes, layout, hiding_axis(axes, world))

    def scattered(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
        recipes = [recipe_of(leaf, ReduceOp.SUM, axes, world) for leaf in leaves]
        sent = wired(leaves, recipes)
        back = plan_half("reduce_scatter", ReduceOp.SUM, layout.packs, sent, *asked)
        scope.record(back)
        cotangents = _compat.at_once(cotangents) if world.over_gloo else cotangents
        own = _scattered(cotangents, back, layout, recipes, axes)
        return ([marks.part_of_sum(part, tuple(axes)) for part in own],)

    gather = jax.custom_vjp(gathered)
    gather.defvjp(lambda parts: (gathered(parts), None), scattered)
    return gather


def recipe_of(leaf: Leaf, reduce_op: ReduceOp, axes: Mapping[str, int], world: World) -> Recipe:
    """How a leaf is reduced of which each replica keeps a part."""
    check_reducible(leaf.path, leaf.dtype, "reduce_scatter")
    over = tuple(a for a, n in axes.items() if n > 1)
    wire = wire_dtype(leaf.dtype, reduce_op, world)
    divisor = count(axes) if reduce_op is ReduceOp.MEAN else None
    return Recipe(over, tuple(axes), frozenset(), leaf.dtype, wire, 1, divisor)


def wired(leaves: Sequence[Leaf], recipes: Sequence[Recipe]) -> list[Leaf]:
    """The leaves in the types that their recipes send them in."""
    both = zip(leaves, recipes, strict=True)
    return [dataclasses.replace(leaf, wire=recipe.wire) for leaf, recipe in both]


def _result_dtype(recipe: Recipe) -> np.dtype:
    wired = jax.ShapeDtypeStruct((), recipe.wire)
    return np.dtype(jax.eval_shape(lambda x: divided(x, recipe), wired).dtype)
