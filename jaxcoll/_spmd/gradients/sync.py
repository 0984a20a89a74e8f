"""A reduction in the backward pass, at the place where a group of gradients appears."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import dtype_of, flattened, where
from jaxcoll._spmd.gradients.per_replica import common
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope, bound_axes, differentiation
from jaxcoll._spmd.shards import check_no_shards

_REASON = "when: in the backward pass, as soon as these gradients exist"


def sync_in_backward(
    params: Any, axis_name: Any, reduce_op: ReduceOp, scope: Scope, options: CommunicationOptions
) -> Any:
    """`params`, whose cotangents are reduced where they appear; see `jc.sync_in_backward`."""
    outer, axes = differentiation(), tuple(bound_axes(axis_name, "sync_in_backward"))
    if outer is not None and set(outer.axes).intersection(axes):
        outer.check_mean(reduce_op, axes, "sync_in_backward")
        scope = scope.merged(outer.options)
    check_no_shards(params, axis_name, "sync_in_backward")
    flat, treedef = flattened(params)
    named = {path: _floating(path, leaf) for path, leaf in flat}
    arrays = jax.tree.leaves(common(treedef.unflatten(named.values()), axes, "sync_in_backward"))
    reduction = _Reduction(reduce_op, axes, treedef, scope.merged(options))
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
        """The reduced cotangents, each typed as its parameter."""
        varied = {i: _compat.as_varying(ct, self.axes) for i, ct in cotangents.items()}
        tree = self.treedef.unflatten(map(varied.get, range(self.treedef.num_leaves)))
        reduced = all_reduce(
            self.reduce_op, tree, self.axes, scope=self.scope, reasons=(_REASON,), in_backward=True
        )
        return {
            i: _compat.as_varying(x, tuple(varying[i]))
            for i, x in zip(varied, jax.tree.leaves(reduced), strict=True)
        }


def _floating(path: str, value: Any) -> jax.Array:
    """`value` as an array that has a gradient, or an error that names its place."""
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
            "that could be reduced. Pass only what is differentiated, and hand the rest on "
            "beside it; None may stand in its place."
        )
    return jnp.asarray(value)
