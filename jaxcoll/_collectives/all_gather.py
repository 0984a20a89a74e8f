"""`all_gather`: join every replica's arrays, or the parts of `Shards`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.pipeline import carry_out, make_sendable, pack, restore_type, unpack
from jaxcoll._collectives.reduce_scatter import gather_shards
from jaxcoll._collectives.scope import (
    Scope,
    count,
    differentiation,
    require_array,
    resolve_axes,
    scope_here,
)
from jaxcoll._collectives.shards import axes_of_shards, is_shards, shards_in
from jaxcoll._collectives.sparse import check_dense
from jaxcoll._compat import marks
from jaxcoll._plan.checks import as_index, check_value_first
from jaxcoll._plan.choose import packing_for, resolve_algorithm
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import flatten_with_paths, make_leaf, where
from jaxcoll._plan.packs.packing import Pack, plan_packs
from jaxcoll._plan.plan import CollectivePlan

_SPARSE = """\
`all_gather` expects dense arrays; {leaf} is an IndexedSlices. To gather the rows of all replicas, \
call `all_reduce`; for a dense array, call its `to_dense()`."""


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
    scope, given = scope_here(), check_options(options, exactly="all_gather")
    check_value_first("jc.all_gather", value)
    names = scope.choose_axes(axis_name, "jc.all_gather")
    if not shards_in(value):
        return gather_tree(value, names, axis=axis, scope=scope.merge(given))
    # The derivative's reduce-scatter is the reduction that an enclosing `value_and_grad` makes.
    inside = differentiation()
    scope = scope.merge(inside.options if inside else None).merge(given)
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
    return jax.tree.map(lambda x: gather_shards(x, names, scope=scope), value, is_leaf=is_shards)


def gather_tree(value: Any, axis_name: str | tuple[str, ...], *, axis: int, scope: Scope) -> Any:
    """Join every replica's leaves along `axis` in replica order; see `jc.all_gather`."""
    axes = resolve_axes(axis_name, "all_gather")
    check_dense(value, _SPARSE, NotImplementedError)
    names, world = tuple(axes), scope.world(axes)
    flat, treedef = flatten_with_paths(value)
    arrays, joints, carried, leaves = [], [], [], []
    for path, leaf in flat:
        arrays.append(require_array(leaf, f"`all_gather` cannot gather {where(path)}"))
        joints.append(find_dimension(axis, arrays[-1].shape, f"`all_gather`: {where(path)}"))
        carried.append(sent := _compat.cast_varying(make_sendable(arrays[-1]), names))
        kind, solid = _compat.varying_axes(sent), _compat.must_keep_shape(sent)
        leaves.append(make_leaf(path, sent, world.sizes, kind=kind, solid=solid))
    # The option `shards` is for sums only.
    options = scope.exactly.options.replace(shards=UNSET)
    algorithm = resolve_algorithm(options, world)
    packs = plan_packs(leaves, packing_for(options, world), lambda pack: algorithm)
    plan = CollectivePlan(
        ReduceOp.SUM, tuple(leaves), packs, world, options, collective="all_gather"
    )
    joined = []
    gathered = rows_of_all(carried, packs, plan, names)
    for array, sent, rows, joint in zip(arrays, carried, gathered, joints, strict=True):
        if rows is None:  # no pack carries it
            rows = jnp.stack([sent] * count(axes))
        n, *shape = rows.shape
        shape[joint] *= n
        whole = jnp.moveaxis(rows, 0, joint).reshape(shape)
        joined.append(restore_type(_compat.cast_invariant(whole, names, summed=True), array))
    return treedef.unflatten(marks.same(joined, names))


def find_dimension(axis: Any, shape: Sequence[int], who: str) -> int:
    """Return `axis`, counted from the front; raise an error about `who` if `shape` lacks it."""
    if (index := as_index(axis)) is None:
        raise ValueError(f"{who}: expected `axis` to be an integer; got {axis!r}.")
    if not shape:
        raise ValueError(f"{who} is a scalar, which has no axis {axis}; pass `x[None]`.")
    if not -len(shape) <= index < len(shape):
        raise ValueError(
            f"{who} has shape {tuple(shape)} and so no axis {axis}; expected one from "
            f"{-len(shape)} to {len(shape) - 1}."
        )
    return index % len(shape)


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
