"""AllReduce of gradients inside the backward pass, as soon as a group of them exists."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.common_over_replicas import check_same_tree
from jaxcoll._collectives.scope import Scope, differentiation, resolve_axes, scope_here
from jaxcoll._collectives.shards import check_no_shards
from jaxcoll._compat import marks
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import dtype_or_none, flatten_with_paths, where

_REASON = "when: in the backward pass, as soon as these gradients exist"


def sync_in_backward(
    params: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    options: CommunicationOptions | None = None,
) -> Any:
    """Return `params`, and reduce their gradient over replicas as soon as it is computed.

    Use it in models that scan over their layers: call it in the body of the scan, on the layer's
    slice of the stacked parameters. It puts one `all_reduce` of the layer's gradient into the loop
    of the backward pass, where it overlaps with differentiating the previous layer.

    Guarantee: the forward pass is the identity. The backward pass makes one `all_reduce` of the
    gradients, packed by a plan, in the dtype of `params`: parameters that are cast to bfloat16
    after the call have gradients that travel as float32. It works under `jax.checkpoint`, in
    nested scans, for parameters used more than once, and for derivatives of any order and mode.

    Call it inside the loss of `jc.value_and_grad` or `jc.grad`. There n devices equal one device,
    whichever leaves are synced, partly synced or not synced: gradients proven to be the same on
    every replica are not sent again, and leaves that differ between replicas are refused. Inside
    plain `jax.grad` only the synced leaves are averaged. The others keep each replica's gradient
    or, under a checked `shard_map`, have the sum that autodiff makes.

    Args:
      params: a pytree of floating arrays, *invariant* or *varying* over the axes; None passes.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case. It must be MEAN inside
        `jc.value_and_grad`, which turns it into its own sum or weighted mean.
      options: as in `all_reduce`. Unset options come from the enclosing `jc.value_and_grad`, then
        from the enclosing program.

    Returns:
      A pytree like `params`, *varying* over the axes, so that autodiff adds no sum of its own. The
      loss must be this replica's own: a loss averaged over replicas has gradients that are already
      divided by their number. Cost: none forward; an `all_reduce` backward.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf has no gradient (its path is named), `reduce_op` is SUM inside
        `jc.value_and_grad`, or a leaf is known to differ between replicas (there, and in
        `strategy.run`).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def loss(stack, x):
      ...     def layer(x, w):
      ...         return x * sync_in_backward(w, "data"), None
      ...     return jax.lax.scan(layer, x, stack)[0]
      >>> step = jax.vmap(grad(loss, "data"), in_axes=(None, 0), axis_name="data")
      >>> step(jnp.array([2.0, 5.0]), jnp.array([1.0, 3.0]))[0].tolist()
      [10.0, 4.0]
    """
    op, scope = ReduceOp.of(reduce_op), scope_here()
    axes = tuple(
        resolve_axes(scope.choose_axes(axis_name, "jc.sync_in_backward"), "sync_in_backward")
    )
    outer = differentiation()
    if outer is not None and set(outer.axes).intersection(axes):
        outer.check_mean(op, axes, "sync_in_backward")
        scope = scope.merge(outer.options)
    check_no_shards(params, axes, "sync_in_backward")
    flat, treedef = flatten_with_paths(params)
    named = {path: _floating(path, leaf) for path, leaf in flat}
    arrays = check_same_tree(treedef.unflatten(named.values()), axes, "sync_in_backward")
    return reduce_backward(arrays, op, axes, scope.merge(check_options(options)))


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
        # JAX may type a cotangent as the same everywhere, that of a constant for one.
        varied = {i: _compat.cast_varying(ct, self.axes) for i, ct in cotangents.items()}
        tree = self.treedef.unflatten(map(varied.get, range(self.treedef.num_leaves)))
        axes = resolve_axes(self.axes, "all_reduce")
        reduction = AllReduce(self.reduce_op, axes, self.scope, notes=(_REASON,), in_backward=True)
        reduced = reduction.reduce(tree)
        return {
            i: _compat.cast_varying(x, tuple(varying[i]))
            for i, x in zip(varied, jax.tree.leaves(reduced), strict=True)
        }


def _floating(path: str, value: Any) -> jax.Array:
    """Make `value` an array that has a gradient, or raise an error that names its path."""
    dtype = dtype_or_none(value)
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
