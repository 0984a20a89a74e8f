"""`reduce_scatter` and `all_gather`: the two halves of a reduction inside a mapped program."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll._collectives import gather
from jaxcoll._collectives import reduce_scatter as _halves
from jaxcoll._collectives.all_reduce import check_order
from jaxcoll._collectives.scope import differentiation, scope_here
from jaxcoll._collectives.shards import (
    Shards,
    axes_of_shards,
    check_no_shards,
    is_shards,
    shards_in,
)
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options


def all_gather(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    axis: int = 0,
    options: CommunicationOptions | None = None,
) -> Any:
    """Concatenate every leaf of a pytree with those of the other replicas, in replica order.

    Guarantee: the result is bitwise `jnp.concatenate` of the replicas' leaves along `axis`. For
    `Shards`, as `reduce_scatter` returns them, it is the whole tree, with its structure, shapes and
    dtypes. The cotangent of a leaf is this replica's slice of the sum of the replicas' cotangents;
    the cotangent of Shards is this replica's part of that sum, by one reduce-scatter.

    If Shards are differentiated inside the loss of `jc.value_and_grad` and its like, the result is
    the gradient of the loss over all replicas, reduced and in Shards. A MEAN divides that sum, and
    nothing is sent twice. Outside, `jax.grad` of each replica's loss gives the gradient of the sum
    of all losses.

    Args:
      value: any pytree of arrays of any dtype, including PRNG keys but no scalars, with the same
        structure and shapes on all replicas. Or `Shards`, or a tree of them.
      axis_name: as in `all_reduce`; with several axes, the outer one varies slowest. For `Shards`,
        the axes they were made over.
      axis: the dimension to concatenate along; a negative one counts from the last. It has no
        meaning for `Shards`.
      options: as in `all_reduce`; the option `shards` has no effect.

    Returns:
      A pytree like `value` with n times the size along `axis`; or the tree of the `Shards`, in the
      dtypes of their parts. It is *invariant* over the axes. (Inside a loss of `jc.value_and_grad`,
      gathered Shards are typed *varying*, like everything differentiated there.) Cost: one
      collective per pack; a device sends its bytes to n-1 others, (n-1)/n of the result.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      NotImplementedError: a leaf is an `IndexedSlices`.
      ValueError: a leaf has no such dimension (its path and shape are named), an argument is
        invalid, or Shards are of stacked layers, of other axes, or mixed with arrays.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> jax.vmap(lambda v: all_gather(v, "data"), axis_name="data")(x)[0].tolist()
      [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    scope, checked_options = scope_here(), check_options(options, exactly="all_gather")
    check_value_first("jc.all_gather", value)
    axes = scope.choose_axes(axis_name, "jc.all_gather")
    if not shards_in(value):
        scope = scope.merge(checked_options)
        return gather.all_gather(value, axes, axis=axis, scope=scope)
    # The derivative's reduce-scatter is the reduction that an enclosing `value_and_grad` makes.
    inside = differentiation()
    scope = scope.merge(inside.options if inside else None).merge(checked_options)
    if axis != 0:
        raise ValueError(
            f"`all_gather` of Shards returns the whole tree, for which `axis` ({axis!r}) has no "
            "meaning: leave it out."
        )
    if len(axes_of_shards(value)) != sum(len(x.parts) for x in shards_in(value)):
        raise ValueError(
            "`all_gather` got a tree of `Shards` and arrays, and the arrays would become n times "
            "as long: gather the Shards by themselves."
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
    """Do the first half of an `all_reduce`: every replica gets 1/n of the reduced tree.

    Guarantee: `all_gather(reduce_scatter(op, value, axis), axis)` is `all_reduce(op, value, axis)`,
    to rounding. The cotangent of `value` is the `all_gather` of the shards' cotangents, divided by
    n for a MEAN; that of the gathered tree is reduce-scattered, as a SUM.

    Args:
      reduce_op: as in `all_reduce`.
      value: any pytree of numeric arrays with the same structure and shapes on all replicas.
        It may have scalars, empty arrays and None, which `all_gather` restores.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`. Without `bytes_per_pack`, every leaf over 2 MiB is a pack of its
        own, and the others share packs of 16 MiB. `shards` is refused: each replica has one.

    Returns:
      `Shards`, *varying* over the axes: for each pack an array of shape (rows, 128), with less than
      one row of padding. Cost: (n-1)/n of the bytes leave each device, half of an `all_reduce`, in
      one collective per pack before the compiler combines them.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf cannot be reduced or split (its path is named), or an argument is invalid.
      AlreadyReducedError: a leaf is already the same on every replica.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.arange(2 * 300.0).reshape(2, 300)
      >>> shards = jax.vmap(lambda v: reduce_scatter("sum", v, "data"), axis_name="data")(x)
      >>> [part.shape for part in shards.parts], float(shards.parts[0][1, 0, 0])
      ([(2, 2, 128)], 812.0)
    """
    check_order(reduce_op, value, "jc.reduce_scatter")
    scope = scope_here().merge(check_options(options))
    axes = scope.choose_axes(axis_name, "jc.reduce_scatter")
    check_no_shards(value, axes, "reduce_scatter")
    op = ReduceOp.of(reduce_op)
    return _halves.reduce_scatter(op, value, axes, scope=scope)
