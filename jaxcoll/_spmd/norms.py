"""What is asked of a whole gradient: its norm, and whether all of it is finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd.arithmetic import wide
from jaxcoll._spmd.axes import bound_axes
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import is_sparse


def global_norm(tree: Any, axis_name: Any, *, scope: Scope) -> jax.Array:
    """The norm of all elements; leaves may be in shards over the axes; see `jc.global_norm`."""
    caller = "jc.global_norm"
    axes = {} if axis_name is None else bound_axes(axis_name, caller)
    leaves = _arrays(tree, caller)
    if not any(_in_shards(x, axes) for x in leaves):
        return jnp.sqrt(_added([_squared(x) for x in leaves]))
    squares = [_counted_once(_squared(x), x, axes) for x in leaves]
    return jnp.sqrt(_summed(_added(squares), axis_name, axes, scope))


def all_finite(tree: Any, axis_name: Any, *, scope: Scope) -> jax.Array:
    """Whether no element on any replica along the axes is infinite or NaN; see `jc.all_finite`."""
    caller = "jc.all_finite"
    axes = {} if axis_name is None else bound_axes(axis_name, caller)
    leaves = [x for x in _arrays(tree, caller) if jnp.issubdtype(x.dtype, np.inexact)]
    bad = _added([jnp.any(~jnp.isfinite(x)).astype(np.float32) for x in leaves])
    if any(_in_shards(x, axes) for x in leaves):
        bad = _summed(bad, axis_name, axes, scope)
    return bad == 0


def _in_shards(x: jax.Array, axes: dict[str, int]) -> bool:
    """Whether replicas hold different parts of a leaf, or might: no type says they do not."""
    return any(a in _compat.varying_axes(x) or not _compat.tracks_variance(a) for a in axes)


def _summed(total: jax.Array, axis_name: Any, axes: dict[str, int], scope: Scope) -> jax.Array:
    total = _compat.as_varying(total, tuple(axes))
    return all_reduce(ReduceOp.SUM, total, axis_name, scope=scope.exactly)


def _counted_once(square: jax.Array, x: jax.Array, axes: dict[str, int]) -> jax.Array:
    """Zero on all replicas but the first of those that are known to hold the same."""
    known = _compat.varying_axes(x)
    same = tuple(a for a in axes if a not in known and _compat.tracks_variance(a))
    return jnp.where(lax.axis_index(same) == 0, square, 0) if same else square


def _squared(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(jnp.abs(x.astype(wide(x.dtype)))))


def _added(numbers: Sequence[jax.Array]) -> jax.Array:
    widest = np.result_type(np.float32, *(x.dtype for x in numbers))
    return sum((x.astype(widest) for x in numbers), jnp.zeros((), widest))


def _arrays(tree: Any, caller: str) -> list[jax.Array]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    return [_array(jax.tree_util.keystr(path), leaf, caller) for path, leaf in flat]


def _array(path: str, leaf: Any, caller: str) -> jax.Array:
    if is_sparse(leaf):
        raise ValueError(
            f"`{caller}`: {where(path)} is an IndexedSlices, whose rows may be parts of one row; "
            "hand over its `to_dense()`."
        )
    dtype = getattr(leaf, "dtype", None)
    if dtype is None and isinstance(leaf, bool | int | float | complex):
        dtype = np.result_type(leaf)
    if dtype is None or not jnp.issubdtype(dtype, np.number):
        got = type(leaf).__name__ if dtype is None else dtype
        raise ValueError(f"`{caller}`: {where(path)}: expected numbers, got {got}.")
    return jnp.asarray(leaf)
