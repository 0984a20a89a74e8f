"""All-gather, which joins every replica's arrays, and broadcast, which sends one replica's."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.pipeline import carry_out, make_sendable, pack, restore_type, unpack
from jaxcoll._collectives.reduce import all_reduce
from jaxcoll._collectives.scope import Scope, count, require_array, resolve_axes, show_axes
from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._compat import marks
from jaxcoll._plan.choose import packing_for, resolve_algorithm
from jaxcoll._plan.options import UNSET, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, flatten_with_paths, where
from jaxcoll._plan.packs.packing import Pack, plan_packs
from jaxcoll._plan.plan import CollectivePlan


def all_gather(value: Any, axis_name: str | tuple[str, ...], *, axis: int, scope: Scope) -> Any:
    """Join every replica's leaves along `axis` in replica order; see `jc.all_gather`."""
    axes = resolve_axes(axis_name, "all_gather")
    flat, treedef = flatten_with_paths(value, is_sparse)
    paths = [path for path, _ in flat]
    arrays = [_require_dense(path, leaf) for path, leaf in flat]
    joints = [
        dimension(axis, array.shape, f"`all_gather`: {where(path)}")
        for path, array in zip(paths, arrays, strict=True)
    ]
    carried = [_compat.cast_varying(make_sendable(array), tuple(axes)) for array in arrays]
    rows = _rows(paths, carried, axes, scope)
    joined = [
        restore_type(_compat.cast_invariant(_join(row, joint), tuple(axes), summed=True), array)
        for row, joint, array in zip(rows, joints, arrays, strict=True)
    ]
    joined = marks.same(joined, tuple(axes))
    return jax.tree_util.tree_unflatten(treedef, joined)


def dimension(axis: Any, shape: Sequence[int], who: str) -> int:
    """Return `axis`, counted from the front; raise an error about `who` if `shape` lacks it."""
    try:
        index = operator.index(axis)
    except TypeError:
        index = None
    if index is None or isinstance(axis, bool):
        raise ValueError(f"{who}: expected `axis` to be an integer; got {axis!r}.")
    if not shape:
        raise ValueError(
            f"{who} is a scalar, which has no axis {axis}; give it one with `x[None]`."
        )
    if not -len(shape) <= index < len(shape):
        raise ValueError(
            f"{who} has shape {tuple(shape)} and so no axis {axis}; expected one from "
            f"{-len(shape)} to {len(shape) - 1}."
        )
    return index % len(shape)


def _rows(
    paths: Sequence[str], arrays: Sequence[jax.Array], axes: dict[str, int], scope: Scope
) -> list[jax.Array]:
    """Gather each array from every replica: one row for each, in replica order."""
    over = tuple(axes.values())
    leaves = []
    for path, array in zip(paths, arrays, strict=True):
        dtype, kind = np.dtype(array.dtype), _compat.varying_axes(array)
        solid = _compat.must_keep_shape(array)
        leaves.append(Leaf(path, array.shape, dtype, dtype, over, kind, solid))
    # The option `shards` is for sums only.
    world = scope.world(axes)
    options = scope.exactly.options.replace(shards=UNSET)
    algorithm = resolve_algorithm(options, world)
    packs = plan_packs(leaves, packing_for(options, world), lambda pack: algorithm)
    plan = CollectivePlan(
        ReduceOp.SUM, tuple(leaves), packs, world, options, collective="all_gather"
    )
    return [
        jnp.stack([array] * count(axes)) if row is None else row  # no pack carries it
        for array, row in zip(arrays, rows_of_all(arrays, packs, plan, tuple(axes)), strict=True)
    ]


def rows_of_all(
    arrays: Sequence[jax.Array],
    packs: Sequence[Pack],  # packs of this replica's arrays
    plan: CollectivePlan,  # the plan of the gathers
    axes: tuple[str, ...],
) -> list[jax.Array | None]:
    """Stack every replica's arrays in replica order; None for an array that no pack carries."""

    def carry(pack: Pack, array: jax.Array) -> jax.Array:
        return algorithms.all_gather(array, plan.stages(pack), axes)

    def leave(pack: Pack, rows: jax.Array) -> jax.Array:
        return _compat.cast_varying(rows, axes)

    packed = pack(arrays, packs, arrays)
    rows = carry_out(plan, packed, carry, leave=leave)
    return jax.vmap(lambda row: unpack(row, packs, arrays))(rows) if rows else [None] * len(arrays)


def _join(rows: jax.Array, axis: int) -> jax.Array:
    n, *shape = rows.shape
    shape[axis] *= n
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def _require_dense(path: str, value: Any) -> jax.Array:
    if is_sparse(value):
        raise NotImplementedError(
            f"`all_gather` expects dense arrays; {where(path)} is an IndexedSlices. To gather the "
            "rows of all replicas, call `all_reduce`; for a dense array, call its `to_dense()`."
        )
    return require_array(value, f"`all_gather` cannot gather {where(path)}")


def broadcast(value: Any, axis_name: str | tuple[str, ...], *, source: int, scope: Scope) -> Any:
    """Return the tree of replica `source`, *invariant* over the axes; see `jc.broadcast`."""
    axes = resolve_axes(axis_name, "broadcast")
    try:
        index = operator.index(source)
    except TypeError:
        index = -1
    if not 0 <= index < count(axes) or isinstance(source, bool):
        raise ValueError(
            f"`broadcast` expects `source` to be an integer from 0 to {count(axes) - 1}, the "
            f"number of a replica along {show_axes(axes)}; got {source!r}."
        )
    # A sum with zeros from the others, for up to twice the bytes: JAX's own broadcast works on GPUs
    # only, and would ignore the options.
    is_source = lax.axis_index(tuple(axes)) == index

    flat, treedef = flatten_with_paths(value)
    expected = "an array of numbers"
    leaves = [
        require_array(x, f"`broadcast` cannot send {where(path)}", expected) for path, x in flat
    ]
    summed = all_reduce(
        ReduceOp.SUM, [_mask(is_source, leaf) for leaf in leaves], axis_name, scope=scope.exactly
    )
    results = [_unmask(total, leaf) for total, leaf in zip(summed, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, results)


def _mask(is_source: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x` on the source and zeros on all other replicas, in a type that sums exactly."""
    if _lacks_zero(x.dtype):
        x = lax.bitcast_convert_type(x, jnp.uint8)
    x = x.astype(np.uint8) if x.dtype == np.bool_ else make_sendable(x)
    return jnp.where(is_source, x, jnp.zeros_like(x))


def _unmask(total: jax.Array, x: jax.Array) -> jax.Array:
    return (
        lax.bitcast_convert_type(total, x.dtype) if _lacks_zero(x.dtype) else restore_type(total, x)
    )


def _lacks_zero(dtype: np.dtype) -> bool:
    """Return whether a numeric type has no zero: float8_e8m0fnu has only powers of two."""
    return jnp.issubdtype(dtype, np.number) and bool(np.zeros((), dtype) != 0)
