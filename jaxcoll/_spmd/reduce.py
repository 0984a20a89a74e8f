"""The one in-program reduction: plan, pack, sum, unpack, and divide for a mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._plan import wire_formats
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import (
    Leaf,
    check_reducible,
    flattened,
    no_array,
    travels_as,
    where,
    wire_dtype,
)
from jaxcoll._plan.packs.packing import Pack, PackingRule
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.planner import make_plan, stages_of_checksum
from jaxcoll._plan.wire_formats import PowerSGD
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.algorithms.table import all_reduce as all_reduce_by
from jaxcoll._spmd.arithmetic import Recipe, after, before
from jaxcoll._spmd.axes import bound_axes, count, named
from jaxcoll._spmd.checks import checksum
from jaxcoll._spmd.checks.corruption_callback import Heard, reported
from jaxcoll._spmd.indexed_slices import IndexedSlices
from jaxcoll._spmd.pack import pack, unpack
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import alike, gathered, is_sparse
from jaxcoll._spmd.wire_formats.feedback import cut_off, left, with_owed
from jaxcoll._spmd.wire_formats.two_phase import Coded, How

Invariant = Literal["error", "summed", "replicated"]

_ALREADY_REDUCED = """\
`all_reduce` over {axes}: {leaf} is already the same on every replica along {missing}, so \
reducing it again would count it {n} times. What probably happened: autodiff has summed this \
gradient already, because its parameter enters a checked `shard_map` replicated. Take the \
gradient with `jc.value_and_grad` or `jc.grad`, which keep it per replica; or say what the leaf \
is: `invariant="summed"` if it is the sum over the replicas (SUM leaves it, MEAN divides it by \
{n}), `invariant="replicated"` if every replica holds this value (SUM multiplies it by {n}, MEAN \
leaves it)."""

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
    packing: PackingRule | None = None,
    ready: Sequence[int] | None = None,
    same: Mapping[str, frozenset[str]] = MappingProxyType({}),
    reasons: tuple[str, ...] = (),
    in_backward: bool = False,
    exact: frozenset[str] = frozenset(),
    residual: Mapping[str, jax.Array] | None = None,
) -> Any:
    """Reduce every leaf of `value` over the replicas along `axis_name`; see `jc.all_reduce`.

    Args:
      reduce_op: SUM or MEAN.
      value: a pytree of arrays and IndexedSlices.
      axis_name: one axis, or several, outer first.
      scope: options, world, and who wants to know.
      invariant: what a leaf that is already the same everywhere is taken for.
      packing: a packing rule that stands whatever the options say.
      ready: for each leaf, in the tree's order, its place in the order in which they become
        ready; None: not known.
      same: paths of leaves that were proven to be equal on every replica along some axes, and
        those axes: they are taken as "replicated" there, whatever their types say.
      reasons: what else the plan should say.
      in_backward: whether the backward pass itself comes by here, as soon as these gradients exist.
      exact: paths of leaves that travel exactly, whatever wire format is asked for.
      residual: by the paths of leaves, what this replica has to send of them beside.

    Returns:
      The reduced tree, *invariant* over the axes. With `residual`, a pair of it and of what is left
      to send the next time, by path; *varying*.

    Raises:
      NameError: an axis is not bound here.
      ValueError: a leaf cannot be reduced, an argument has a value it may not have, or the
        algorithm that was asked for does not fit the axes.
      AlreadyReducedError: a leaf is already reduced and nothing says how it is meant.
    """
    if invariant not in get_args(Invariant):
        raise ValueError(
            f"`invariant` must be one of {', '.join(map(repr, get_args(Invariant)))}; "
            f"got {invariant!r}."
        )
    axes = bound_axes(axis_name, "all_reduce")
    world = scope.world(axes)
    flat, treedef = flattened(value, is_sparse)
    paths = [path for path, _ in flat]
    taken = [_taken(path, leaf) for path, leaf in flat]
    # Equal values are those of the first replica, which alone has their cotangent.
    taken = [
        _compat.as_invariant(x, tuple(same[path]), summed=True) if path in same else x
        for path, x in zip(paths, taken, strict=True)
    ]
    arrays = [x.values if isinstance(x, IndexedSlices) else x for x in taken]
    scope = _without_factors(scope, paths, taken, exact, in_backward)
    wires = [
        (wire_dtype(np.dtype(array.dtype), reduce_op, world), "")
        if path in exact or isinstance(whole, IndexedSlices) or _compat.is_partially_sharded(array)
        else travels_as(np.dtype(array.dtype), array.shape, reduce_op, world, scope.options)
        for path, whole, array in zip(paths, taken, arrays, strict=True)
    ]
    recipes = [
        _recipe(reduce_op, path, array, axes, wire, invariant, same.get(path, frozenset()))
        for path, array, (wire, _) in zip(paths, arrays, wires, strict=True)
    ]
    leaves = [
        dataclasses.replace(_leaf(path, whole, array, recipe, axes), format=format)
        for path, whole, array, recipe, (_, format) in zip(
            paths, taken, arrays, recipes, wires, strict=True
        )
    ]
    if ready is not None:
        leaves = [dataclasses.replace(x, ready=k) for x, k in zip(leaves, ready, strict=True)]
    terms = scope.terms(world)
    plan = make_plan(reduce_op, leaves, scope.options, world, packing, terms, in_backward)
    plan = dataclasses.replace(plan, reasons=(*plan.reasons, *reasons))
    scope.record(plan)
    if residual is not None:
        arrays = with_owed(arrays, leaves, residual, count(axes))
    packs = pack(arrays, plan.packs, leaves, [plan.elements(p) for p in plan.packs])
    sums, coded = _carry_out(plan, packs, scope.heard, residual is not None)
    hidden = hiding_axis(axes) if world.platform == "cpu" else None
    reduced = unpack(sums, plan.packs, leaves, one_kernel_a_shape=hidden)
    results = [
        _settled(x if is_sparse(x) else array, recipe, packed, f"{plan.name}/rows{k}")
        for k, (x, array, recipe, packed) in enumerate(
            zip(taken, arrays, recipes, reduced, strict=True)
        )
    ]
    result = scope.vouched(jax.tree_util.tree_unflatten(treedef, results), axes)
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
    path: str,
    whole: jax.Array | IndexedSlices,
    array: jax.Array,
    recipe: Recipe,
    axes: Mapping[str, int],
) -> Leaf:
    """What the plan knows of a leaf, but for how it travels and when it is ready."""
    sparse = isinstance(whole, IndexedSlices)
    return Leaf(
        path=path,
        shape=array.shape,
        dtype=recipe.dtype,
        wire=recipe.dtype if sparse else recipe.wire,
        kind=recipe,
        over=tuple(n if a in recipe.over else 1 for a, n in axes.items()),
        solid=_compat.is_partially_sharded(array),
        indices=np.dtype(whole.indices.dtype) if sparse else None,
    )


def check_any_coded(value: Any, given: CommunicationOptions) -> None:
    """Refuse a wire format, asked for in this call, for leaves of which it codes none by type."""
    found = [getattr(x, "dtype", None) for x in jax.tree.leaves(value)]
    if None not in found:
        wire_formats.check_any_coded(given.compression, found)


def reduced_once(op: ReduceOp, value: Any, axis_name: Any, *, scope: Scope) -> Any:
    """`value`, marked for those who look for reductions of what is the same on every replica."""
    if not scope.once:
        return value
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    flat, treedef = flattened(value, is_sparse)
    mark = functools.partial(scope.reduced_once, axes=names, mean=op is ReduceOp.MEAN)
    marked = [_reduced_once(path, x, mark) for path, x in flat]
    return jax.tree_util.tree_unflatten(treedef, marked)


def _reduced_once(path: str, leaf: Any, mark: Callable[..., Any]) -> Any:
    if isinstance(leaf, IndexedSlices):
        return IndexedSlices(mark(leaf.values, name=path), leaf.indices, leaf.dense_shape)
    is_number = isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic)
    return mark(jnp.asarray(leaf) if is_number else leaf, name=path)


def hiding_axis(axes: dict[str, int]) -> str | None:
    """An axis whose index no compiler knows beforehand."""
    return next((a for a, n in axes.items() if n > 1 and not _compat.is_vmapped(a)), None)


def _settled(
    leaf: jax.Array | IndexedSlices, recipe: Recipe, packed: jax.Array | None, name: str
) -> Any:
    """The result for one leaf: what came out of its packs, if any carried it."""
    if isinstance(leaf, IndexedSlices):
        with jax.named_scope(name):
            return gathered(leaf, recipe)
    return after(before(leaf, recipe), recipe) if packed is None else packed


def _carry_out(
    plan: Plan, packs: Sequence[jax.Array], heard: Heard, feedback: bool
) -> tuple[list[jax.Array], dict[int, tuple[Coded | None, jax.Array | None]]]:
    """Each pack summed, by the stages that the plan has for it, and made the result.

    Also, by the numbers of packs in a wire format, what was coded and what was lost beside.
    """
    sent, totals, coded = [], [], {}
    how = How(feedback, plan.world.platform)
    for k, (planned, array) in enumerate(zip(plan.packs, packs, strict=True)):
        recipe = cast(Recipe, planned.kind)
        with jax.named_scope(f"{plan.name}/pack{k}"):
            array = before(array, recipe)
            if plan.chained and totals:
                array = _compat.ordered(array, after=totals[-1])
            sent.append(array)
            stages = plan.stages(planned)
            if planned.format:
                total, coded[k] = algorithms.coded_all_reduce(array, stages, recipe.axes, how)
            else:
                total = algorithms.all_reduce(array, stages, recipe.axes)
            totals.append(total)
    bad = _corrupted(plan, sent, totals, heard) if plan.checksum else {}
    results, lost = [], {}
    for k, (planned, total) in enumerate(zip(plan.packs, totals, strict=True)):
        recipe = cast(Recipe, planned.kind)
        with jax.named_scope(f"{plan.name}/pack{k}"):
            result = after(total, recipe)
            if planned.format:
                lost[k] = coded[k], cut_off(total, result, recipe)
            if k in bad:
                result = checksum.marked(result, _compat.as_invariant(bad[k], recipe.axes))
            # A quotient that goes into a sum next must not be rounded with it.
            divided = plan.reproducible and (recipe.divisor or recipe.times > 1)
            results.append(_compat.as_stored(result) if divided else result)
    return results, lost


def _corrupted(
    plan: Plan, sent: Sequence[jax.Array], totals: Sequence[jax.Array], heard: Heard
) -> dict[int, jax.Array]:
    """For each pack that travels, how many replicas hold what cannot be its sum."""
    alike: dict[Any, list[int]] = {}
    for k, planned in enumerate(plan.packs):
        recipe = cast(Recipe, planned.kind)
        if recipe.over and sent[k].size:
            alike.setdefault((recipe.over, checksum.kind(recipe.wire)), []).append(k)
    bad = {}
    for (over, _), packs in alike.items():
        replicas = count({a: lax.axis_size(a) for a in over})
        with jax.named_scope(f"{plan.name}/checksum"):
            found = checksum.corrupted(
                [sent[k] for k in packs],
                [totals[k] for k in packs],
                over,
                replicas,
                functools.partial(_added, plan, plan.packs[packs[0]]),
            )
            found = reported(found, over, plan, packs, heard)
            bad.update({k: found[j] for j, k in enumerate(packs)})
    return bad


def _added(plan: Plan, planned: Pack, few: jax.Array) -> jax.Array:
    """The sum of few numbers over the replicas over which a pack is summed."""
    stages = stages_of_checksum(plan, planned, few.size, np.dtype(few.dtype))
    return all_reduce_by(few, stages, cast(Recipe, planned.kind).axes)


def _recipe(
    reduce_op: ReduceOp,
    path: str,
    array: jax.Array,
    axes: dict[str, int],
    wire: np.dtype,
    invariant: Invariant,
    same: frozenset[str],
) -> Recipe:
    by_type = _compat.same_axes(array, axes)
    missing = {a: n for a, n in axes.items() if a in by_type or a in same}
    if invariant == "error" and array.size and not same.issuperset(by_type):
        raise AlreadyReducedError(
            _ALREADY_REDUCED.format(
                axes=named(axes), leaf=where(path), missing=named(missing), n=count(missing)
            )
        )
    repeated = 1 if invariant == "summed" else count(missing)
    dtype = np.dtype(array.dtype)
    return Recipe(
        over=tuple(a for a, n in axes.items() if n > 1 and a not in missing),
        axes=tuple(axes),
        varying=_compat.varying_axes(array),
        dtype=dtype,
        wire=wire,
        times=repeated,
        divisor=count(axes) // repeated if reduce_op is ReduceOp.MEAN else None,
    )


def _taken(path: str, leaf: Any) -> jax.Array | IndexedSlices:
    """`leaf` as it is reduced, or an error that names its place."""
    if not isinstance(leaf, IndexedSlices):
        return _as_array(path, leaf)
    leaf.check(f"`all_reduce`: {where(path)}")
    check_reducible(path + ".values", leaf.values.dtype)
    return alike(leaf)


def _as_array(path: str, value: Any) -> jax.Array:
    """`value` as an array that can be summed, or an error that names its place."""
    dtype, got = getattr(value, "dtype", None), no_array(value)
    if got is not None:
        raise ValueError(
            f"`all_reduce` cannot reduce {where(path)}: expected an array or a number, got {got}."
        )
    check_reducible(path, np.result_type(value) if dtype is None else dtype)
    return jnp.asarray(value)
