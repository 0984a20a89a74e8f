"""The halves of a reduction inside a mapped program: each replica's part, and all parts joined."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll._api.collectives import check_order
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._spmd import gather
from jaxcoll._spmd import reduce_scatter as _halves
from jaxcoll._spmd.scope import differentiation, scope_here
from jaxcoll._spmd.shards import Shards, axes_of_shards, check_no_shards, is_shards, shards_in


def all_gather(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    axis: int = 0,
    options: CommunicationOptions | None = None,
) -> Any:
    """Join every leaf of a pytree with those of the other replicas, in replica order.

    Guarantee: the result is `jnp.concatenate` of the replicas' leaves along `axis`, to the bit. Of
    the `Shards` that `reduce_scatter` returns it is the tree whose parts they are: its structure,
    shapes and dtypes. The cotangent of a leaf is its own slice of the sum of the replicas'
    cotangents; that of Shards is this replica's part of that sum, by one reduce-scatter.

    Inside the loss of `jc.value_and_grad` and its like, Shards that are differentiated get the
    gradient of the loss over all replicas so, reduced and in Shards: they make a mean of the sum
    where one is asked for, and send nothing again. Outside, `jax.grad` of each replica's own loss
    is the gradient of the sum of all losses.

    Args:
      value: any pytree of arrays, of any dtype, PRNG keys among them, equal on all replicas in
        structure and shape; none may be a scalar. Or `Shards`, or a tree of them.
      axis_name: as in `all_reduce`; along several axes the outer counts slowest. Of `Shards` the
        one they were made over.
      axis: the dimension along which each leaf is joined; negative ones count from the last. It
        has no meaning for `Shards`.
      options: as in `all_reduce`; there is nothing to cut in `shards`.

    Returns:
      A pytree like `value`, with n times the size along `axis`, or the tree of the `Shards`, in the
      types of their parts; *invariant* over the axes (Shards inside a loss of `jc.value_and_grad`
      are typed *varying*, as all that is differentiated there). Cost: one collective a pack; a
      device sends its own bytes to n-1 others, (n-1)/n of the result.

    Raises:
      NameError: an axis is not mapped here; the message lists those that are.
      NotImplementedError: a leaf is an `IndexedSlices`.
      ValueError: a leaf has no such dimension (its path and shape are named), or an argument is
        invalid; Shards are of stacked layers, of other axes, or stand beside arrays.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> jax.vmap(lambda v: all_gather(v, "data"), axis_name="data")(x)[0].tolist()
      [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    scope, own_options = scope_here(), checked(options, exactly="all_gather")
    axes = scope.over(axis_name, "jc.all_gather")
    if not shards_in(value):
        scope = scope.merged(own_options)
        return gather.all_gather(value, axes, axis=axis, scope=scope)
    # The derivative's reduce-scatter is the reduction that an enclosing `value_and_grad` asks for.
    inside = differentiation()
    scope = scope.merged(inside.options if inside else None).merged(own_options)
    if axis != 0:
        raise ValueError(
            f"`all_gather` of Shards gives the tree that they are parts of; `axis` ({axis!r}) "
            "has no meaning there: leave it out."
        )
    if len(axes_of_shards(value)) != sum(len(x.parts) for x in shards_in(value)):
        raise ValueError(
            "`all_gather` got a tree with `Shards` and with arrays beside them, which would become "
            "n times as long: gather the Shards by themselves."
        )
    return jax.tree.map(
        lambda x: _halves.all_gather(x, axes, scope=scope), value, is_leaf=is_shards
    )


def reduce_scatter(
    reduce_op: ReduceOp | str,
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Shards:
    """The first half of an `all_reduce`: every replica ends with an n-th of the reduced tree.

    Guarantee: `all_gather(reduce_scatter(op, value, axis), axis)` is `all_reduce(op, value, axis)`,
    to rounding. The cotangent of `value` is the `all_gather` of the shards' cotangents, divided by
    n for a MEAN; that of the gathered tree is reduce-scattered, as a SUM.

    Args:
      reduce_op: as in `all_reduce`.
      value: any pytree of numeric arrays, equal on all replicas in structure and shape; empty
        arrays, scalars and None come back from `all_gather` as they were.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`; without `bytes_per_pack`, leaves over 2 MiB are packs of their
        own and others share packs of 16 MiB. `shards` is refused: there is one for each replica.

    Returns:
      `Shards`, *varying* over the axes: for each pack an array of shape (rows, 128), of which less
      than a row is padding. Cost: (n-1)/n of the bytes leave each device, half of an `all_reduce`;
      one collective a pack before the compiler combines them.

    Raises:
      NameError: an axis is not mapped here; the message lists those that are.
      ValueError: a leaf cannot be reduced or cut (its path is named), or an argument is invalid.
      AlreadyReducedError: a leaf is the same on every replica already.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.arange(2 * 300.0).reshape(2, 300)
      >>> shards = jax.vmap(lambda v: reduce_scatter("sum", v, "data"), axis_name="data")(x)
      >>> [part.shape for part in shards.parts], float(shards.parts[0][1, 0, 0])
      ([(2, 2, 128)], 812.0)
    """
    check_order(reduce_op, value, "jc.reduce_scatter")
    scope = scope_here().merged(checked(options))
    axes = scope.over(axis_name, "jc.reduce_scatter")
    check_no_shards(value, axes, "reduce_scatter")
    op = ReduceOp.of(reduce_op)
    return _halves.reduce_scatter(op, value, axes, scope=scope)
