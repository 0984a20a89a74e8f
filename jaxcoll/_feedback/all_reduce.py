"""The reduction with a residual: of whole leaves in any wire format, or of PowerSGD's factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._feedback.residual import closed, opened, right_factor
from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import flattened
from jaxcoll._plan.wire_formats import PowerSGD
from jaxcoll._spmd import reduce
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.axes import bound_axes, count
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import is_sparse
from jaxcoll._spmd.wire_formats.blocks import largest
from jaxcoll._spmd.wire_formats.feedback import finite

_NOTHING = np.float32(1e-6)
"""A column of which projections leave less, of a largest number of 1, is rounding alone."""


class _Left(NamedTuple):
    """What stands for a matrix in the first reduction; the field is in the plan's leaf paths."""

    left: jax.Array


class _Right(NamedTuple):
    """What stands for it in the second one."""

    right: jax.Array


def all_reduce(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    residual: Any,  # what `jc.residual` returned, or the last call
    of: Any,  # the tree that it is of, as it stands in `value` at the path `prefix`
    caller: str,  # the function to name in a message
    scope: Scope,
    prefix: str = "",
    **how: Any,  # as in `reduce.all_reduce`
) -> tuple[Any, Any]:
    """`reduce.all_reduce` of `value` and of what is owed of it, and the next residual."""
    axes = bound_axes(axis_name, caller)
    owed = opened(residual, of, axes, caller, prefix)
    format = scope.options.compression
    matrices: dict[str, tuple[int, int]] = {}
    if isinstance(format, PowerSGD):
        scope = scope.exactly
        # Rows and columns of the leaves that travel as factors, by path. A number has no type.
        matrices = {
            path: matrix
            for path, leaf in flattened(value, is_sparse)[0]
            if count(axes) > 1 and path in owed and hasattr(leaf, "dtype")
            if (matrix := format.matrix(leaf.shape, np.dtype(leaf.dtype)))
        }
    if not isinstance(format, PowerSGD) or not matrices:
        result, left = reduce.all_reduce(
            reduce_op, value, axis_name, scope=scope, residual=owed, **how
        )
        return result, closed(residual, left, prefix)
    rights = {
        path: right_factor(residual, path[len(prefix) :], columns, format, caller)
        for path, (_, columns) in matrices.items()
    }
    reason = format.reason(len(matrices))
    result, left, new = _in_factors(
        reduce_op, value, axes, owed, matrices, rights, scope, reason, **how
    )
    right = {path[len(prefix) :]: factor for path, factor in new.items()}
    return result, closed(residual, left, prefix, right)


def _in_factors(
    op: ReduceOp,
    value: Any,
    axes: Mapping[str, int],
    owed: Mapping[str, jax.Array],
    matrices: Mapping[str, tuple[int, int]],
    rights: Mapping[str, jax.Array],
    scope: Scope,
    reason: str,
    *,
    reasons: tuple[str, ...] = (),
    invariant: reduce.Invariant = "error",
    **how: Any,
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """The reduced tree, what is owed then, and the next right factors, both by path."""
    names, reasons = tuple(axes), (*reasons, reason)
    flat, treedef = flattened(value, is_sparse)
    leaves = dict(flat)
    values = {p: leaves[p].astype(np.float32).reshape(matrix) for p, matrix in matrices.items()}
    owing = {p: owed[p].reshape(matrix) for p, matrix in matrices.items()}
    # Apart, so that a leaf that is the same on all replicas is refused as any other.
    fixed = {p: lax.stop_gradient(x) for p, x in values.items()}
    first = {**leaves, **{p: _Left(_product(x, rights[p])) for p, x in fixed.items()}}
    beside = {p: x for p, x in owed.items() if p not in matrices}
    beside |= {f"{p}.left": _product(x, rights[p]) for p, x in owing.items()}
    reduced, left = reduce.all_reduce(
        op, treedef.unflatten(first.values()), names,
        scope=scope, invariant=invariant, reasons=reasons, residual=beside, **how,
    )  # fmt: skip
    own = {p: x + owing[p] for p, x in fixed.items()}
    results = dict(zip(leaves, treedef.flatten_up_to(reduced), strict=True))
    columns = _orthonormal([results[path].left for path in matrices])
    lefts = dict(zip(matrices, columns, strict=True))

    parts = {path: _product(own[path].T, lefts[path]) for path in matrices}
    second = [_Right(parts[path]) if path in matrices else None for path in leaves]
    sums = reduce.all_reduce(op, treedef.unflatten(second), names, scope=scope, reasons=reasons)
    found = dict(zip(matrices, jax.tree.leaves(sums), strict=True))

    native = stages("native", 0, tuple(axes.values()))
    divisor = count(axes) if op is ReduceOp.MEAN else 1
    for path, factor in found.items():
        total = _product(lefts[path], factor.T)
        result = total.astype(leaves[path].dtype)
        # A replica's own projection, and its share of what the leaf's type cannot hold.
        lost = own[path] - _product(lefts[path], parts[path].T)
        if result.dtype != total.dtype:
            rest_of = total - result.astype(total.dtype)
            lost += rest_of if op is ReduceOp.MEAN else rest_of / count(axes)
        left[path] = lost.reshape(leaves[path].shape)
        exact = algorithms.as_exact(result, values[path], native, names, divisor)
        results[path] = exact.reshape(leaves[path].shape)
    # What each replica has as its own is not in `value`.
    fine = finite([results[path] for path in owed if path in results])
    left = {path: jnp.where(fine, left[path], x) for path, x in owed.items() if path in results}
    new = {p: jnp.where(fine, _refreshed(x, rights[p]), rights[p]) for p, x in found.items()}
    before = jax.tree.leaves([*leaves.values()])
    arrays = marks.same(jax.tree.leaves([*results.values()]), names, before)
    return jax.tree.unflatten(jax.tree.structure(value), arrays), left, new


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product in float32, which accelerators would round to fewer bits."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _orthonormal(matrices: Sequence[jax.Array]) -> list[jax.Array]:
    """For each matrix of shape (m, r) orthonormal columns that span its own.

    A column that depends on those before it becomes zero. Anything not finite makes all of its
    matrix NaN. By one loop for all matrices, so that programs stay small: matrices of one shape
    go side by side.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(i)
    stacked = [jnp.stack([_scaled(matrices[i].T) for i in members]) for members in alike.values()]
    zeros = [_compat.zeros_like_aval(jax.typeof(rows), rows.dtype) for rows in stacked]

    def turn(i: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
        return [_next(i, rows, before) for rows, before in zip(stacked, found, strict=True)]

    found = lax.fori_loop(0, stacked[0].shape[1], turn, zeros)
    by_place = {
        i: rows[k].T
        for members, rows in zip(alike.values(), found, strict=True)
        for k, i in enumerate(members)
    }
    return [by_place[i] for i in range(len(matrices))]


def _next(i: jax.Array, rows: jax.Array, before: jax.Array) -> jax.Array:
    """`before`, of shape (k, r, m), and in it row `i` of `rows`: Gram-Schmidt, twice."""
    row = lax.dynamic_index_in_dim(rows, i, 1)
    for _ in range(2):  # rows from `i` on are zero still
        row = row - _product(_product(row, before.swapaxes(1, 2)), before)
    norm = jnp.sqrt((row * row).sum(-1, keepdims=True))
    row = jnp.where(norm <= _NOTHING, np.float32(0), row / norm)  # of NaN: NaN
    return lax.dynamic_update_index_in_dim(before, row, i, 1)


def _refreshed(factor: jax.Array, before: jax.Array) -> jax.Array:
    """A right factor for the next call, its columns scaled; one of zeros is as it was before.

    Otherwise a column of a matrix that was zero once would send nothing ever after, and squares of
    gradients would underflow.
    """
    columns = _scaled(factor.T).T
    return jnp.where((columns == 0).all(0), before, columns)


def _scaled(rows: jax.Array) -> jax.Array:
    """Rows with a largest magnitude of 1, or of zeros: no square over- or underflows."""
    most = lax.bitcast_convert_type(largest(rows), jnp.float32)[:, None]
    # Compilers multiply by reciprocals, and that of 2e38 is flushed to zero.
    less = jnp.where(most > np.float32(1e30), np.float32(2.0**-40), np.float32(1))
    return jnp.where(most < np.float32(1e-34), np.float32(0), rows * less / (most * less))
