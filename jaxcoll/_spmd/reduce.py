"""The one in-program reduction: plan, pack, sum, unpack, and divide for a mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import jax
import numpy as np

from jaxcoll import _compat
from jaxcoll._compat import marks
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
from jaxcoll._plan.packs.packing import Pack, PackingRule
from jaxcoll._plan.planner import make_plan
from jaxcoll._plan.world import World
from jaxcoll._spmd import residual as residuals
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.algorithms.coded import Coded, Coding
from jaxcoll._spmd.arithmetic import Recipe, after, before
from jaxcoll._spmd.axes import already_reduced, as_array, bound_axes, count, listed
from jaxcoll._spmd.pipeline import carry_out, hiding_axis, pack, unpack
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import IndexedSlices, alike, gathered, is_sparse
from jaxcoll._wire.format import check_any_coded as check_dtypes

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
    owed: Mapping[str, jax.Array] | None = None,  # this replica's residual of leaves, by path
) -> Any:
    """Reduce every leaf of `value` over the replicas along `axis_name`; see `jc.all_reduce`.

    Leaves are checked and described, the plan is made of the descriptions and recorded, and then
    carried out: all that a program shows of the reduction is in it.

    Returns:
      The reduced tree, *invariant* over the axes. With `owed`, a pair of it and of what is left to
      send the next time, by path; *varying*.
    """
    axes = bound_axes(axis_name, "all_reduce")
    world = scope.world(axes)
    flat, treedef = flattened(value, is_sparse)
    exactly = scope.exactly.options if exact else scope.options
    taken, leaves = [], []
    for k, (path, leaf) in enumerate(flat):
        equal = same.get(path, frozenset())
        array = _taken(path, leaf, axes, equal)
        options = exactly if path in exact else scope.options
        place = None if ready is None else ready[k]
        taken.append(array)
        leaves.append(_leaf(reduce_op, path, array, axes, world, options, invariant, equal, place))
    if others := _compat.automatic_axes():
        reasons = (*reasons, _LEAF_BY_LEAF.format(axes=listed(others)))
    plan = make_plan(
        reduce_op, leaves, scope.options, world, packing, in_backward=in_backward, notes=reasons
    )
    scope.record(plan)
    arrays = [x.values if isinstance(x, IndexedSlices) else x for x in taken]
    if owed is not None:
        arrays = residuals.with_owed(arrays, leaves, owed, count(axes))
    coding, hidden = Coding(owed is not None, world.platform), hiding_axis(axes, world)

    def enter(pack: Pack, array: jax.Array) -> jax.Array:
        return before(array, cast(Recipe, pack.kind))

    def carry(pack: Pack, array: jax.Array) -> tuple[jax.Array, Coded | None]:
        return algorithms.all_reduce(array, plan.stages(pack), cast(Recipe, pack.kind).axes, coding)

    def leave(pack: Pack, carried: Any) -> tuple[jax.Array, jax.Array | None]:
        (total, coded), recipe = carried, cast(Recipe, pack.kind)
        result, lost = after(total, recipe), None
        if owed is not None and pack.format is not None:
            lost = residuals.cut_off(total, result, recipe)
            if coded is not None:
                lost += algorithms.lost(coded, plan.stages(pack), recipe.axes, coding, total)
        # A quotient that goes into a sum next must not be rounded with it.
        divided = plan.reproducible and (recipe.divisor or recipe.times > 1)
        return (_compat.as_stored(result) if divided else result), lost

    packed = pack(arrays, plan.packs, leaves, [plan.elements(p) for p in plan.packs])
    carried = carry_out(plan, packed, enter, carry, leave)
    reduced: list[Any] = unpack(
        [x for x, _ in carried], plan.packs, leaves, one_kernel_a_shape=hidden
    )
    for k, (x, array, leaf) in enumerate(zip(taken, arrays, leaves, strict=True)):
        recipe = cast(Recipe, leaf.kind)
        if is_sparse(x):
            with jax.named_scope(f"{plan.name}/rows{k}"):
                reduced[k] = gathered(x, recipe)
        elif reduced[k] is None:  # no pack carries it
            reduced[k] = after(before(array, recipe), recipe)
    arrays, structure = jax.tree.flatten(reduced)
    sums_up = reduce_op is ReduceOp.SUM and not (in_backward or repeats)
    arrays = marks.same(arrays, tuple(axes), jax.tree.leaves(taken), sums=sums_up)
    result = jax.tree_util.tree_unflatten(treedef, jax.tree.unflatten(structure, arrays))
    return (
        result if owed is None else (result, residuals.left(owed, plan, carried, reduced, hidden))
    )


def _taken(
    path: str, leaf: Any, axes: Mapping[str, int], equal: frozenset[str]
) -> jax.Array | IndexedSlices:
    """Return `leaf` as it is reduced, or raise an error that names its place."""
    if is_sparse(leaf):
        leaf.check(f"`all_reduce`: {where(path)}")
        check_reducible(path + ".values", leaf.values.dtype)
        return alike(leaf)
    array = as_array(leaf, f"`all_reduce` cannot reduce {where(path)}", "an array or a number")
    check_reducible(path, dtype_of(leaf))
    array = _compat.terms_of_sum(array, axes)
    # Equal values are those of the first replica, which alone has their cotangent.
    return _compat.as_invariant(array, tuple(equal), summed=True)


def _leaf(
    reduce_op: ReduceOp,
    path: str,
    leaf: jax.Array | IndexedSlices,
    axes: dict[str, int],
    world: World,
    options: CommunicationOptions,
    invariant: Invariant,
    equal: frozenset[str],
    ready: int | None,
) -> Leaf:
    """Return the description of a leaf that the plan is made of."""
    indices = leaf.indices if isinstance(leaf, IndexedSlices) else None
    array = leaf.values if isinstance(leaf, IndexedSlices) else leaf
    dtype, keeps_shape = np.dtype(array.dtype), _compat.must_keep_shape(array)
    if indices is not None or keeps_shape:
        wire, format = wire_dtype(dtype, reduce_op, world), None
        if wire.name == "bfloat16" and world.platform == "cpu" and _compat.automatic_axes():
            wire = np.dtype(np.float32)  # XLA's CPU compiler aborts on a sum of 16 bits there
    else:
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
        solid=keeps_shape,
        indices=None if indices is None else np.dtype(indices.dtype),
        ready=ready,
        format=format,
    )


def check_any_coded(value: Any, options: CommunicationOptions) -> None:
    """Refuse a wire format, asked for in this call, for leaves of which it codes none by type."""
    dtypes = [getattr(x, "dtype", None) for x in jax.tree.leaves(value)]
    if None not in dtypes:
        check_dtypes(options.compression, dtypes)
