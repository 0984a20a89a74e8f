"""All-reduce inside a program: plan, pack, sum, unpack, and divide for a mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.algorithms.coded import Coded, Coding
from jaxcoll._collectives.pipeline import Recipe, carry_out, finish_sum, make_summand, pack, unpack
from jaxcoll._collectives.scope import Scope, already_reduced, count, resolve_axes, show_axes
from jaxcoll._compat import marks
from jaxcoll._plan.choose import make_plan
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import (
    Leaf,
    Whole,
    check_reducible,
    dtype_or_none,
    flatten_with_paths,
    is_whole,
    travels_as,
    where,
    wire_dtype,
)
from jaxcoll._plan.packs.packing import Pack, PackingRule
from jaxcoll._plan.world import World

if TYPE_CHECKING:
    from jaxcoll._collectives.residual import Feedback

Invariant = Literal["error", "summed", "replicated"]

_REPLICATED = """\
If every replica holds this value, like a learning rate, pass `invariant="replicated"`: then MEAN \
returns it unchanged, and SUM multiplies it by {n}."""

_SUMMED = """\
take it with `jc.value_and_grad` or `jc.grad`, which keep it per replica, or pass \
`invariant="summed"`: then SUM returns it unchanged, and MEAN divides it by {n}."""

_LEAF_BY_LEAF = """\
leaf by leaf, by the compiler's own all-reduce: the compiler splits leaves over {axes}, and would \
have to gather them into a pack"""


def all_reduce(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    scope: Scope,
    invariant: Invariant = "error",
    packing: PackingRule | None = None,  # overrides the options
    # For each leaf, in the tree's order, its rank in the order in which leaves become ready
    ready: Sequence[int] | None = None,
    # Paths of leaves that are proven equal on every replica along some axes, and these axes: leaves
    # count as "replicated" there, despite their types
    same: Mapping[str, frozenset[str]] = MappingProxyType({}),
    reasons: tuple[str, ...] = (),  # further notes for the plan
    in_backward: bool = False,  # the call is part of a backward pass
    exact: frozenset[str] = frozenset(),  # paths of leaves that travel exactly despite the options
    repeats: bool = False,  # counting equal values once per replica is intended, so do not warn
    feedback: Feedback | None = None,  # this replica's residuals of the leaves
) -> Any:
    """Reduce every leaf of `value` over the replicas along `axis_name`; see `jc.all_reduce`.

    The steps: check and describe the leaves, make a plan from the descriptions, record it, and
    carry it out. The program communicates what the plan shows, and nothing else.

    Returns:
      The reduced tree, *invariant* over the axes. With `feedback`, a pair of that tree and the next
      residual, *varying*.
    """
    axes = resolve_axes(axis_name, "all_reduce")
    world = scope.world(axes)
    typed, automatic = _compat.types_tracked(), _compat.automatic_axes()
    context = _Context(reduce_op, axes, world, invariant, typed, automatic)
    flat, treedef = flatten_with_paths(value, functools.partial(is_whole, axes=axes))
    exactly = scope.exactly.options if exact else scope.options
    # The user's leaves once checked, the arrays to sum, and the plan's descriptions of them
    taken, arrays, leaves = [], [], []
    for k, (path, leaf) in enumerate(flat):
        equal = same.get(path, frozenset())
        taken.append(context.prepare(path, leaf, equal))
        arrays.append(taken[k].values if isinstance(leaf, Whole) else taken[k])
        options = exactly if path in exact else scope.options
        rank = None if ready is None else ready[k]
        leaves.append(context.describe(path, taken[k], options, equal, rank))
    if automatic:
        reasons = (*reasons, _LEAF_BY_LEAF.format(axes=show_axes(automatic)))
    plan = make_plan(
        reduce_op, leaves, scope.options, world, packing, in_backward=in_backward, notes=reasons
    )
    scope.record(plan)
    if feedback is not None:
        arrays = feedback.add_to(arrays, leaves, count(axes))
    coding = Coding(feedback is not None, world.platform)

    def enter(pack: Pack, array: jax.Array) -> jax.Array:
        return make_summand(array, cast(Recipe, pack.kind))

    def carry(pack: Pack, array: jax.Array) -> tuple[jax.Array, Coded | None]:
        return algorithms.all_reduce(array, plan.stages(pack), cast(Recipe, pack.kind).axes, coding)

    def leave(pack: Pack, carried: Any) -> tuple[jax.Array, jax.Array | None]:
        (total, coded), recipe = carried, cast(Recipe, pack.kind)
        result, lost = finish_sum(total, recipe), None
        if feedback is not None:
            lost = feedback.rounding_error(plan, pack, total, result, coded, coding)
        # Round a quotient by itself: fused with a sum that follows, both would be rounded at once.
        divided = plan.options.reproducible and (recipe.divisor or recipe.times > 1)
        return (_compat.round_as_stored(result) if divided else result), lost

    packed = pack(arrays, plan.packs, leaves, plan.elements)
    carried = carry_out(plan, packed, carry, enter=enter, leave=leave)
    on_cpus_along = tuple(axes) if world.platform == "cpu" else ()
    reduced: list[Any] = unpack(
        [result for result, _ in carried], plan.packs, leaves, on_cpus_along
    )
    for k, (x, array, leaf) in enumerate(zip(taken, arrays, leaves, strict=True)):
        recipe = cast(Recipe, leaf.kind)
        if isinstance(x, Whole):
            with jax.named_scope(f"{plan.name}/rows{k}"):
                reduced[k] = x._reduce(recipe)
        elif reduced[k] is None:  # no pack carries it
            reduced[k] = finish_sum(make_summand(array, recipe), recipe)
    # Mark the results as equal for the proof, which reads the program where types do not say so.
    arrays, structure = jax.tree.flatten(reduced)
    sums_up = reduce_op is ReduceOp.SUM and not (in_backward or repeats)
    arrays = marks.same(arrays, tuple(axes), jax.tree.leaves(taken), sums=sums_up)
    result = jax.tree_util.tree_unflatten(treedef, jax.tree.unflatten(structure, arrays))
    if feedback is None:
        return result
    return result, feedback.next(plan, carried, reduced, on_cpus_along)


@dataclasses.dataclass(frozen=True)
class _Context:
    """Facts about one reduction that apply to all of its leaves."""

    reduce_op: ReduceOp
    axes: dict[str, int]
    world: World
    invariant: Invariant
    typed: bool  # types say over which axes values vary
    automatic: tuple[str, ...]  # axes that the compiler's partitioner manages

    def prepare(self, path: str, leaf: Any, equal: frozenset[str]) -> jax.Array | Whole:
        """Return `leaf` ready for the reduction, or raise an error that names its path."""
        if isinstance(leaf, Whole):
            return leaf._prepare(path, "all_reduce")
        dtype = dtype_or_none(leaf)
        if dtype is None or isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`all_reduce` cannot reduce {where(path)}: expected an array or a number, got "
                f"{type(leaf).__name__}."
            )
        check_reducible(path, dtype)
        array = jnp.asarray(leaf)
        if not self.typed:
            return array
        array = _compat.terms_of_sum(array, self.axes)
        # Equal values count as the first replica's, which alone gets their cotangent.
        return _compat.cast_invariant(array, tuple(equal), summed=True)

    def describe(
        self,
        path: str,
        leaf: jax.Array | Whole,
        options: CommunicationOptions,
        equal: frozenset[str],
        ready: int | None,
    ) -> Leaf:
        """Return the plan's description of a leaf."""
        indices = leaf.indices if isinstance(leaf, Whole) else None
        array = leaf.values if isinstance(leaf, Whole) else leaf
        dtype = np.dtype(array.dtype)
        keeps_shape = bool(self.automatic) or _compat.is_partially_sharded(array)
        if indices is not None or keeps_shape:
            wire, format = wire_dtype(dtype, self.reduce_op, self.world), None
            if wire.name == "bfloat16" and self.world.platform == "cpu" and self.automatic:
                wire = np.dtype(np.float32)  # XLA's CPU compiler aborts on a 16-bit sum here
        else:
            wire, format = travels_as(dtype, array.shape, self.reduce_op, self.world, options)
        by_type = _compat.same_axes(array, self.axes) if self.typed else ()
        missing, over, sizes = {}, [], []
        for axis, n in self.axes.items():
            if axis in by_type or axis in equal:
                missing[axis] = n
            elif n > 1:
                over.append(axis)
            sizes.append(1 if axis in missing else n)
        if self.invariant == "error" and array.size and not equal.issuperset(by_type):
            advice = {"value": _REPLICATED, "gradient": _SUMMED}
            raise already_reduced("all_reduce", path, array, self.axes, missing, **advice)
        repeated = 1 if self.invariant == "summed" else count(missing)
        divisor = count(self.axes) // repeated if self.reduce_op is ReduceOp.MEAN else None
        varying = _compat.varying_axes(array) if self.typed else frozenset()
        return Leaf(
            path=path,
            shape=array.shape,
            dtype=dtype,
            wire=wire if indices is None else dtype,
            kind=Recipe(tuple(over), tuple(self.axes), varying, dtype, wire, repeated, divisor),
            over=tuple(sizes),
            solid=keeps_shape,
            indices=None if indices is None else np.dtype(indices.dtype),
            ready=ready,
            format=format,
        )


_NO_RESIDUAL = """\
`{caller}` expects what `jc.compression.residual(params)` returns as its residual, or what this \
call returned the last time; got {got}."""


def make_feedback(
    residual: Any, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = ""
) -> Any:
    """Return the `Feedback` for a sum of `tree`, where its leaves' paths begin with `prefix`."""
    feedback_for = getattr(residual, "feedback", None) if isinstance(residual, Whole) else None
    if feedback_for is None:
        raise ValueError(_NO_RESIDUAL.format(caller=caller, got=type(residual).__name__))
    return feedback_for(tree, axes, caller, prefix)
