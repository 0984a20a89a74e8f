"""Reduction of gradients inside the backward pass, as soon as a group of them exists."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._collectives.common_over_replicas import common
from jaxcoll._collectives.reduce import all_reduce
from jaxcoll._collectives.scope import Scope, bound_axes, differentiation
from jaxcoll._collectives.shards import check_no_shards
from jaxcoll._compat import marks
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import dtype_of, flattened, where

_REASON = "when: in the backward pass, as soon as these gradients exist"


def sync_in_backward(
    params: Any, axis_name: Any, reduce_op: ReduceOp, scope: Scope, options: CommunicationOptions
) -> Any:
    """Return `params`, with their cotangents reduced once they exist; see `jc.sync_in_backward`."""
    outer, axes = differentiation(), tuple(bound_axes(axis_name, "sync_in_backward"))
    if outer is not None and set(outer.axes).intersection(axes):
        outer.check_mean(reduce_op, axes, "sync_in_backward")
        scope = scope.merged(outer.options)
    check_no_shards(params, axis_name, "sync_in_backward")
    flat, treedef = flattened(params)
    named = {path: _floating(path, leaf) for path, leaf in flat}
    arrays = common(treedef.unflatten(named.values()), axes, "sync_in_backward")
    return reduce_backward(arrays, reduce_op, axes, scope.merged(options))


def reduce_backward(tree: Any, reduce_op: ReduceOp, axes: tuple[str, ...], scope: Scope) -> Any:
    """Mark arrays that are the same everywhere, so that their cotangents are reduced."""
    arrays, treedef = jax.tree.flatten(tree)
    reduction = _Reduction(reduce_op, axes, treedef, scope)
    return treedef.unflatten(marks.through_backward(arrays, reduction, axes))


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """The reduction of one group's cotangents."""

    reduce_op: ReduceOp
    axes: tuple[str, ...]
    treedef: jax.tree_util.PyTreeDef
    scope: Scope

    def __call__(
        self, cotangents: dict[int, jax.Array], varying: dict[int, frozenset[str]]
    ) -> dict[int, jax.Array]:
        """Reduce the cotangents, and type each as its parameter, by the axes in `varying`."""
        varied = {i: _compat.cast_varying(ct, self.axes) for i, ct in cotangents.items()}
        tree = self.treedef.unflatten(map(varied.get, range(self.treedef.num_leaves)))
        reduced = all_reduce(
            self.reduce_op, tree, self.axes, scope=self.scope, reasons=(_REASON,), in_backward=True
        )
        return {
            i: _compat.cast_varying(x, tuple(varying[i]))
            for i, x in zip(varied, jax.tree.leaves(reduced), strict=True)
        }


def _floating(path: str, value: Any) -> jax.Array:
    """Make `value` an array that has a gradient, or raise an error that names its path."""
    dtype = dtype_of(value)
    if dtype is None:
        raise ValueError(
            f"`sync_in_backward` cannot take {where(path)}: expected a floating array, got "
            f"{type(value).__name__}."
        )
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        kind = "float0" if dtype == jax.dtypes.float0 else dtype
        raise ValueError(
            f"`sync_in_backward` cannot take {where(path)}: an array of {kind} has no gradient "
            "to reduce. Pass only the differentiated leaves, with None in place of the others, "
            "and use those directly."
        )
    return jnp.asarray(value)
