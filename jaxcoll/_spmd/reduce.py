"""The one in-program reduction: plan, pack, sum, unpack, and divide for a mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import jax
import numpy as np

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._plan import wire_formats
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import (
    Leaf,
    check_reducible,
    dtype_of,
    flattened,
    travels_as,
    where,
    wire_dtype,
)
from jaxcoll._plan.packs.packing import PackingRule
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.planner import make_plan
from jaxcoll._plan.wire_formats import PowerSGD
from jaxcoll._plan.world import World
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.arithmetic import Recipe, after, before
from jaxcoll._spmd.axes import already_reduced, as_array, bound_axes, count, listed
from jaxcoll._spmd.pack import pack, unpack
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import IndexedSlices, alike, gathered, is_sparse
from jaxcoll._spmd.wire_formats.feedback import cut_off, left, with_owed
from jaxcoll._spmd.wire_formats.two_phase import Coded, How

Invariant = Literal["error", "summed", "replicated"]

_REPLICATED = """\
If every replica holds this value, as a learning rate, say `invariant="replicated"`: MEAN leaves \
it, SUM multiplies it by {n}."""

_SUMMED = """\
take it with `jc.value_and_grad` or `jc.grad`, which keep it per replica, or say \
`invariant="summed"`: SUM leaves it, MEAN divides it by {n}."""

_LEAF_BY_LEAF = """\
leaf by leaf, by the compiler's own all-reduce: the compiler splits leaves over {axes}, and would \
have to gather what is put together"""

_NO_FEEDBACK = """\
`compression` {format!r} loses most of a gradient but for its residual, and {leaf} is reduced \
without one{where}. Give `jc.all_reduce` a `residual`, or `jc.value_and_grad`, `jc.grad`, \
`jc.accumulate` or `jc.all_reduce_updates` feedback=True, with \
`jc.residual(params, options=options)`."""


def all_reduce(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    scope: Scope,
    invariant: Invariant = "error",
    packing: PackingRule | None = None,  # a rule that stands whatever the options say
    # For each leaf, in the tree's order, its place in the order in which they become ready
    ready: Sequence[int] | None = None,
    # Paths of leaves that were proven to be equal on every replica along some axes, and those axes:
    # they are taken as "replicated" there, whatever their types say
    same: Mapping[str, frozenset[str]] = MappingProxyType({}),
    reasons: tuple[str, ...] = (),  # what else the plan should say
    in_backward: bool = False,  # the backward pass itself comes by here
    exact: frozenset[str] = frozenset(),  # paths of leaves that travel exactly, whatever is asked
    repeats: bool = False,  # a sum may count what is the same everywhere repeatedly, and means it
    residual: Mapping[str, jax.Array] | None = None,  # what this replica owes of leaves, by path
) -> Any:
    """Reduce every leaf of `value` over the replicas along `axis_name`; see `jc.all_reduce`.

    Returns:
      The reduced tree, *invariant* over the axes. With `residual`, a pair of it and of what is left
      to send the next time, by path; *varying*.
    """
    axes = bound_axes(axis_name, "all_reduce")
    world = scope.world(axes)
    flat, treedef = flattened(value, is_sparse)
    paths = [path for path, _ in flat]
    along = [same.get(path, frozenset[str]()) for path in paths]
    taken = [_taken(*leaf, axes, equal) for leaf, equal in zip(flat, along, strict=True)]
    scope = _without_factors(scope, paths, taken, exact, in_backward)
    leaves = [
        _leaf(reduce_op, path, x, axes, world, scope.options, invariant, equal, path in exact)
        for path, x, equal in zip(paths, taken, along, strict=True)
    ]
    if ready is not None:
        leaves = [dataclasses.replace(x, ready=k) for x, k in zip(leaves, ready, strict=True)]
    if others := _compat.automatic_axes():
        reasons = (*reasons, _LEAF_BY_LEAF.format(axes=listed(others)))
    plan = make_plan(
        reduce_op, leaves, scope.options, world, packing, in_backward=in_backward, notes=reasons
    )
    scope.record(plan)
    arrays = [x.values if isinstance(x, IndexedSlices) else x for x in taken]
    if residual is not None:
        arrays = with_owed(arrays, leaves, residual, count(axes))
    packs = pack(arrays, plan.packs, leaves, [plan.elements(p) for p in plan.packs])
    sums, coded = _carry_out(plan, packs, residual is not None)
    hidden = hiding_axis(axes, world)
    reduced = unpack(sums, plan.packs, leaves, one_kernel_a_shape=hidden)
    results = []
    for k, (x, array, leaf, found) in enumerate(zip(taken, arrays, leaves, reduced, strict=True)):
        recipe = cast(Recipe, leaf.kind)
        if is_sparse(x):
            with jax.named_scope(f"{plan.name}/rows{k}"):
                found = gathered(x, recipe)
        elif found is None:  # no pack carries it
            found = after(before(array, recipe), recipe)
        results.append(found)
    arrays, structure = jax.tree.flatten(results)
    sums_up = reduce_op is ReduceOp.SUM and not (in_backward or repeats)
    arrays = marks.same(arrays, tuple(axes), jax.tree.leaves(taken), sums=sums_up)
    result = jax.tree_util.tree_unflatten(treedef, jax.tree.unflatten(structure, arrays))
    if residual is None:
        return result
    return result, left(residual, plan, sums, results, coded, hidden)


def _without_factors(
    scope: Scope,
    paths: Sequence[str],
    taken: Sequence[jax.Array | IndexedSlices],
    exact: frozenset[str],
    in_backward: bool,
) -> Scope:
    """`scope`, exact under PowerSGD, which comes here without a residual: matrices are refused."""
    format = scope.options.compression
    if not isinstance(format, PowerSGD):
        return scope
    for path, leaf in zip(paths, taken, strict=True):
        if path in exact or isinstance(leaf, IndexedSlices):
            continue
        if format.matrix(leaf.shape, np.dtype(leaf.dtype)):
            by = " by `jc.sync_in_backward`, which can keep none" if in_backward else ""
            raise ValueError(_NO_FEEDBACK.format(format=str(format), leaf=where(path), where=by))
    return scope.exactly


def _leaf(
    reduce_op: ReduceOp,
    path: str,
    leaf: jax.Array | IndexedSlices,
    axes: dict[str, int],
    world: World,
    options: CommunicationOptions,
    invariant: Invariant,
    equal: frozenset[str],
    exact: bool,
) -> Leaf:
    """What the plan knows of a leaf, but for when it is ready."""
    indices = leaf.indices if isinstance(leaf, IndexedSlices) else None
    array = leaf.values if isinstance(leaf, IndexedSlices) else leaf
    dtype, solid = np.dtype(array.dtype), _compat.must_keep_shape(array)
    wire, format = wire_dtype(dtype, reduce_op, world), ""
    if wire.name == "bfloat16" and world.platform == "cpu" and _compat.automatic_axes():
        wire = np.dtype(np.float32)  # XLA's CPU compiler aborts on a sum of 16 bits there
    if not exact and not solid and indices is None:
        wire, format = travels_as(dtype, array.shape, reduce_op, world, options)
    by_type = _compat.same_axes(array, axes)
    missing = {a: n for a, n in axes.items() if a in by_type or a in equal}
    if invariant == "error" and array.size and not equal.issuperset(by_type):
        raise already_reduced(
            "all_reduce", path, array, axes, missing, value=_REPLICATED, gradient=_SUMMED
        )
    repeated = 1 if invariant == "summed" else count(missing)
    over = tuple(a for a, n in axes.items() if n > 1 and a not in missing)
    divisor = count(axes) // repeated if reduce_op is ReduceOp.MEAN else None
    varying = _compat.varying_axes(array)
    return Leaf(
        path=path,
        shape=array.shape,
        dtype=dtype,
        wire=wire if indices is None else dtype,
        kind=Recipe(over, tuple(axes), varying, dtype, wire, repeated, divisor),
        over=tuple(n if a in over else 1 for a, n in axes.items()),
        solid=solid,
        indices=None if indices is None else np.dtype(indices.dtype),
        format=format,
    )


def check_any_coded(value: Any, given: CommunicationOptions) -> None:
    """Refuse a wire format, asked for in this call, for leaves of which it codes none by type."""
    found = [getattr(x, "dtype", None) for x in jax.tree.leaves(value)]
    if None not in found:
        wire_formats.check_any_coded(given.compression, found)


def hiding_axis(axes: Mapping[str, int], world: World) -> str | None:
    """An axis whose index XLA's CPU compiler does not know beforehand, for `unpack` there."""
    known = (a for a, n in axes.items() if n > 1 and not _compat.is_vmapped(a))
    return next(known, None) if world.platform == "cpu" else None


def _carry_out(
    plan: Plan, packs: Sequence[jax.Array], feedback: bool
) -> tuple[list[jax.Array], dict[int, tuple[Coded | None, jax.Array | None]]]:
    """Each pack summed, by the stages that the plan has for it, and made the result.

    Also, by the numbers of packs in a wire format, what was coded and what was lost beside.
    """
    totals, coded = [], {}
    how = How(feedback, plan.world.platform)
    for k, (planned, array) in enumerate(zip(plan.packs, packs, strict=True)):
        recipe = cast(Recipe, planned.kind)
        with jax.named_scope(f"{plan.name}/pack{k}"):
            array = before(array, recipe)
            if plan.chained and totals:
                array = _compat.ordered(array, after=totals[-1])
            stages = plan.stages(planned)
            if planned.format:
                total, coded[k] = algorithms.coded_all_reduce(array, stages, recipe.axes, how)
            else:
                total = algorithms.all_reduce(array, stages, recipe.axes)
            totals.append(total)
    results, lost = [], {}
    for k, (planned, total) in enumerate(zip(plan.packs, totals, strict=True)):
        recipe = cast(Recipe, planned.kind)
        with jax.named_scope(f"{plan.name}/pack{k}"):
            result = after(total, recipe)
            if planned.format:
                lost[k] = coded[k], cut_off(total, result, recipe)
            # A quotient that goes into a sum next must not be rounded with it.
            divided = plan.reproducible and (recipe.divisor or recipe.times > 1)
            results.append(_compat.as_stored(result) if divided else result)
    return results, lost


def _taken(
    path: str, leaf: Any, axes: Mapping[str, int], equal: frozenset[str]
) -> jax.Array | IndexedSlices:
    """`leaf` as it is reduced, or an error that names its place."""
    if is_sparse(leaf):
        leaf.check(f"`all_reduce`: {where(path)}")
        check_reducible(path + ".values", leaf.values.dtype)
        return alike(leaf)
    array = as_array(leaf, f"`all_reduce` cannot reduce {where(path)}", "an array or a number")
    check_reducible(path, dtype_of(leaf))
    array = _compat.terms_of_sum(array, axes)
    # Equal values are those of the first replica, which alone has their cotangent.
    return _compat.as_invariant(array, tuple(equal), summed=True)
