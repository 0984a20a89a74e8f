"""The reduction with a residual: of whole leaves in any wire format, or of PowerSGD's factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._feedback.low_rank import orthonormal, product, refreshed
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
from jaxcoll._spmd.wire_formats.feedback import finite


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
        matrices = _matrices(format, value, owed) if count(axes) > 1 else {}
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


def _matrices(
    format: PowerSGD, value: Any, owed: Mapping[str, jax.Array]
) -> dict[str, tuple[int, int]]:
    """Rows and columns of the leaves that travel as factors, by path."""
    found = {}
    for name, leaf in flattened(value, is_sparse)[0]:
        if name not in owed or not hasattr(leaf, "dtype"):  # a number
            continue
        if matrix := format.matrix(leaf.shape, np.dtype(leaf.dtype)):
            found[name] = matrix
    return found


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
    first = {**leaves, **{p: _Left(product(x, rights[p])) for p, x in fixed.items()}}
    beside = {p: x for p, x in owed.items() if p not in matrices}
    beside |= {f"{p}.left": product(x, rights[p]) for p, x in owing.items()}
    reduced, left = reduce.all_reduce(
        op, treedef.unflatten(first.values()), names,
        scope=scope, invariant=invariant, reasons=reasons, residual=beside, **how,
    )  # fmt: skip
    own = {p: x + owing[p] for p, x in fixed.items()}
    results = dict(zip(leaves, treedef.flatten_up_to(reduced), strict=True))
    columns = orthonormal([results[path].left for path in matrices])
    lefts = dict(zip(matrices, columns, strict=True))

    parts = {path: product(own[path].T, lefts[path]) for path in matrices}
    second = [_Right(parts[path]) if path in matrices else None for path in leaves]
    sums = reduce.all_reduce(op, treedef.unflatten(second), names, scope=scope, reasons=reasons)
    found = dict(zip(matrices, jax.tree.leaves(sums), strict=True))

    native = stages("native", 0, tuple(axes.values()))
    divisor = count(axes) if op is ReduceOp.MEAN else 1
    for path, factor in found.items():
        total = product(lefts[path], factor.T)
        result = total.astype(leaves[path].dtype)
        # A replica's own projection, and its share of what the leaf's type cannot hold.
        lost = own[path] - product(lefts[path], parts[path].T)
        if result.dtype != total.dtype:
            rest_of = total - result.astype(total.dtype)
            lost += rest_of if op is ReduceOp.MEAN else rest_of / count(axes)
        left[path] = lost.reshape(leaves[path].shape)
        exact = algorithms.as_exact(result, values[path], native, names, divisor)
        results[path] = exact.reshape(leaves[path].shape)
    # What each replica has as its own is not in `value`.
    fine = finite([results[path] for path in owed if path in results])
    left = {path: jnp.where(fine, left[path], x) for path, x in owed.items() if path in results}
    new = {p: jnp.where(fine, refreshed(x, rights[p]), rights[p]) for p, x in found.items()}
    return scope.vouched(treedef.unflatten(results.values()), names), left, new
