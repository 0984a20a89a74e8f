"""`reduce_scatter`, the first half of an all-reduce, and the gather of its `Shards`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.all_reduce import check_order
from jaxcoll._collectives.common_over_replicas import check_same_tree
from jaxcoll._collectives.parts import (
    check_fits,
    describe_tree,
    join_blocks,
    split_in_blocks,
    unpack_leaves,
)
from jaxcoll._collectives.pipeline import Recipe, carry_out, make_summand, pack, scale_sum
from jaxcoll._collectives.scope import (
    Scope,
    already_reduced,
    count,
    loss_axes,
    resolve_axes,
    scope_here,
    show_axes,
    show_sizes,
)
from jaxcoll._collectives.shards import Shards, check_no_shards
from jaxcoll._compat import marks
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import Leaf, check_reducible, exact_dtype, wire_dtype
from jaxcoll._plan.packs.packing import Pack
from jaxcoll._plan.packs.shard_layout import ShardLayout, SummedLayout, lay_out, plan_half
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._plan.world import World
from jaxcoll._show.units import pluralize

_REDUCED = """\
If it is the mean already, pass it to the optimizer's `update` with `reduced=True`."""

_SUMMED = """\
take it with `jc.value_and_grad(..., scatter=True)`, which sums it once and leaves each replica \
its part."""


def reduce_scatter(
    reduce_op: ReduceOp | str,
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Shards:
    """Do the first half of an `all_reduce`: every replica gets 1/n of the reduced tree.

    Guarantee: `all_gather(reduce_scatter(op, value, axis), axis)` is `all_reduce(op, value, axis)`,
    to rounding. The cotangent of `value` is the `all_gather` of the shards' cotangents, divided by
    n for a MEAN; that of the gathered tree is reduce-scattered, as a SUM.

    Args:
      reduce_op: as in `all_reduce`.
      value: any pytree of numeric arrays with the same structure and shapes on all replicas.
        It may have scalars, empty arrays and None, which `all_gather` restores.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`. Without `bytes_per_pack`, every leaf over 2 MiB is a pack of its
        own, and the others share packs of 16 MiB. `shards` is refused: each replica has one.

    Returns:
      `Shards`, *varying* over the axes: for each pack an array of shape (rows, 128), with less than
      one row of padding. Cost: (n-1)/n of the bytes leave each device, half of an `all_reduce`, in
      one collective per pack before the compiler combines them.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf cannot be reduced or split (its path is named), or an argument is invalid.
      AlreadyReducedError: a leaf is already the same on every replica.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.arange(2 * 300.0).reshape(2, 300)
      >>> shards = jax.vmap(lambda v: reduce_scatter("sum", v, "data"), axis_name="data")(x)
      >>> [part.shape for part in shards.parts], float(shards.parts[0][1, 0, 0])
      ([(2, 2, 128)], 812.0)
    """
    check_order(reduce_op, value, "jc.reduce_scatter")
    scope = scope_here().merge(check_options(options))
    axes = scope.choose_axes(axis_name, "jc.reduce_scatter")
    check_no_shards(value, axes, "reduce_scatter")
    op = ReduceOp.of(reduce_op)
    return scatter_tree(op, value, axes, scope=scope)


def scatter_tree(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    scope: Scope,
    layout: ShardLayout | None = None,  # None: a new one
    repeats: bool = False,  # counting equal values once per replica is intended, so do not warn
) -> Shards:
    """Return this replica's part of the reduced tree; see `jc.reduce_scatter`."""
    axes = resolve_axes(axis_name, "reduce_scatter")
    world = scope.world(axes)
    treedef, leaves = describe_tree(value, axes, "reduce_scatter")
    arrays = [_compat.terms_of_sum(jnp.asarray(x), axes) for x in treedef.flatten_up_to(value)]
    for leaf, array in zip(leaves, arrays, strict=True):
        same = {a: axes[a] for a in _compat.same_axes(array, axes)}
        if same and array.size:
            advice = {"value": _REDUCED, "gradient": _SUMMED}
            raise already_reduced("reduce_scatter", leaf.path, array, axes, same, **advice)
    if layout is not None:
        check_fits(layout, treedef, leaves, count(axes), "reduce_scatter")
    asked = reduce_op, axes, world, scope.options, layout
    plan, layout, recipes = plan_scatter(treedef, leaves, *asked)
    scope.record(plan)
    parts = _scatter(arrays, plan, layout, recipes, axes)
    parts = tuple(marks.part_of_sum(part, tuple(axes)) for part in parts)
    # Without types, only the proof of the whole program can find a sum of what was summed before.
    if reduce_op is ReduceOp.SUM and not repeats and not _compat.types_tracked():
        summed = [{leaves[s.leaf].path: arrays[s.leaf] for s in p.segments} for p in layout.packs]
        over = tuple(axes), "reduce_scatter", "summands"
        parts = tuple(marks.require(x, xs, *over) for x, xs in zip(parts, summed, strict=True))
    return Shards(parts, layout, tuple(axes))


def _scatter(
    arrays: Sequence[jax.Array],
    plan: CollectivePlan,
    layout: ShardLayout,
    recipes: Sequence[Recipe],
    axes: Mapping[str, int],
) -> tuple[jax.Array, ...]:
    """Return this replica's part of each pack of the reduced leaves."""

    def enter(pack: Pack, array: jax.Array) -> jax.Array:
        return split_in_blocks(make_summand(array, recipes[pack.segments[0].leaf]), layout, pack)

    def carry(pack: Pack, blocks: jax.Array) -> jax.Array:
        return algorithms.reduce_scatter(blocks, plan.stages(pack), tuple(axes))

    def leave(pack: Pack, total: jax.Array) -> jax.Array:
        recipe = recipes[pack.segments[0].leaf]
        part = scale_sum(total, recipe)
        return _compat.store(part) if plan.reproducible and recipe.divisor else part

    packed = pack(arrays, layout.packs, layout.leaves)
    return tuple(carry_out(plan, packed, carry, enter=enter, leave=leave))


def plan_scatter(
    treedef: Any,
    leaves: Sequence[Leaf],
    reduce_op: ReduceOp,
    axes: Mapping[str, int],
    world: World,
    options: CommunicationOptions,
    layout: ShardLayout | None = None,
) -> tuple[CollectivePlan, ShardLayout, list[Recipe]]:
    """Return the plan of a `reduce_scatter`, the layout of its result, and each leaf's recipe."""
    recipes = [make_recipe(leaf, reduce_op, axes, world) for leaf in leaves]
    if layout is None:
        # Shards hold results, whose types may be others: the mean of integers is a float.
        ends = []
        for leaf, recipe in zip(leaves, recipes, strict=True):
            wired = jax.ShapeDtypeStruct((), recipe.wire)
            end = np.dtype(jax.eval_shape(functools.partial(scale_sum, recipe=recipe), wired).dtype)
            ends.append(dataclasses.replace(leaf, dtype=end, wire=end))
        layout = lay_out(treedef, tuple(ends), count(axes), options.bytes_per_pack)
    sent = set_wire_types(layout.leaves, recipes)
    plan = plan_half("reduce_scatter", reduce_op, layout.packs, sent, options, world)
    return plan, layout, recipes


def local_part(
    value: Any, axis_name: Any, caller: str, *, scope: Scope, layout: ShardLayout | None = None
) -> Shards:
    """Return this replica's part of a tree that all replicas hold; *varying*. Sends nothing."""
    axes = resolve_axes(axis_name, caller)
    treedef, leaves = describe_tree(value, axes, caller)
    if layout is None:
        layout = lay_out(treedef, leaves, count(axes), scope.options.bytes_per_pack)
    else:
        check_fits(layout, treedef, leaves, count(axes), caller)
    arrays = [jnp.asarray(x) for x in treedef.flatten_up_to(value)]
    arrays = jax.tree.leaves(check_same_tree(treedef.unflatten(arrays), axes, caller))
    rank = _compat.cast_varying(lax.axis_index(tuple(axes)), tuple(axes))
    parts = [
        lax.dynamic_index_in_dim(split_in_blocks(packed, layout, p), rank, keepdims=False)
        for p, packed in zip(layout.packs, pack(arrays, layout.packs, layout.leaves), strict=True)
    ]
    return Shards(tuple(parts), layout, tuple(axes))


def gather_shards(shards: Shards, axis_name: str | tuple[str, ...], *, scope: Scope) -> Any:
    """Return the whole tree of `shards`, *invariant*; see `jc.all_gather`."""
    axes = resolve_axes(axis_name, "all_gather")
    layout = shards.layout
    if tuple(axes) != shards.axes or count(axes) != layout.replicas:
        raise ValueError(
            f"`all_gather` over {show_sizes(axes)} got Shards of "
            f"{pluralize(layout.replicas, 'replica')} over {show_axes(shards.axes)}; "
            "gather them over the axes they were made over."
        )
    if isinstance(layout, SummedLayout):
        raise ValueError(
            "`all_gather` got a residual. Each replica has its own for the whole tree: there is "
            "nothing to gather. Between programs `jc.unshard` returns their sum."
        )
    if shards.stack:
        raise ValueError(
            f"`all_gather` got Shards of {shards.stack[0]} stacked layers, too large to gather at "
            "once: gather each layer where it is used, in the body of a `lax.scan` over these "
            "Shards, or with `jc.scan_layers`. Between programs `jc.unshard` returns the tree."
        )
    parts = [_compat.cast_varying(x, tuple(axes)) for x in shards.parts]
    arrays = _make_gather(layout, shards.leaves, axes, scope)(parts)
    if not loss_axes().issuperset(axes):
        arrays = [_compat.cast_invariant(x, tuple(axes), summed=True) for x in arrays]
    arrays = marks.same(arrays, tuple(axes))
    return jax.tree_util.tree_unflatten(layout.treedef, arrays)  # pyright: ignore[reportArgumentType]


def _make_gather(
    layout: ShardLayout, leaves: Sequence[Leaf], axes: Mapping[str, int], scope: Scope
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Return a function from parts to leaves, *varying*; its backward pass is a reduce-scatter SUM.

    The derivative that JAX would make sends as many bytes, but it adds up one padded pack for each
    leaf, and no plan would show it.
    """
    world = scope.world(dict(axes))
    context = (scope.options, world)
    plan = plan_half("all_gather", ReduceOp.SUM, layout.packs, leaves, *context)
    scope.record(plan)

    def enter(pack: Pack, part: jax.Array) -> jax.Array:
        return part.astype(exact_dtype(part.dtype))

    def carry(pack: Pack, part: jax.Array) -> jax.Array:
        return algorithms.all_gather(part, plan.stages(pack), tuple(axes))

    def leave(pack: Pack, blocks: jax.Array) -> jax.Array:
        return join_blocks(blocks.astype(leaves[pack.segments[0].leaf].dtype), pack)

    def gather(parts: list[jax.Array]) -> list[jax.Array]:
        wholes = carry_out(plan, parts, carry, enter=enter, leave=leave)
        wholes = _compat.depend_on_all(wholes) if world.over_gloo else wholes
        return unpack_leaves(wholes, layout, world.platform == "cpu")

    def scatter(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
        recipes = [make_recipe(leaf, ReduceOp.SUM, axes, world) for leaf in leaves]
        sent = set_wire_types(leaves, recipes)
        back = plan_half("reduce_scatter", ReduceOp.SUM, layout.packs, sent, *context)
        scope.record(back)
        cotangents = _compat.depend_on_all(cotangents) if world.over_gloo else cotangents
        parts = _scatter(cotangents, back, layout, recipes, axes)
        return ([marks.part_of_sum(part, tuple(axes)) for part in parts],)

    differentiable = jax.custom_vjp(gather)
    differentiable.defvjp(lambda parts: (gather(parts), None), scatter)
    return differentiable


def make_recipe(leaf: Leaf, reduce_op: ReduceOp, axes: Mapping[str, int], world: World) -> Recipe:
    check_reducible(leaf.path, leaf.dtype, "reduce_scatter")
    over = tuple(a for a, n in axes.items() if n > 1)
    wire = wire_dtype(leaf.dtype, reduce_op, world)
    divisor = count(axes) if reduce_op is ReduceOp.MEAN else None
    return Recipe(over, tuple(axes), frozenset(), leaf.dtype, wire, 1, divisor)


def set_wire_types(leaves: Sequence[Leaf], recipes: Sequence[Recipe]) -> list[Leaf]:
    both = zip(leaves, recipes, strict=True)
    return [dataclasses.replace(leaf, wire=recipe.wire) for leaf, recipe in both]
