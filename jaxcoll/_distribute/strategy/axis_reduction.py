"""A reduction over the replicas and over dimensions of each one's value, weighted by element."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._distribute.ops.cross_device_ops import CrossDeviceOps
from jaxcoll._distribute.values.held import check_same_devices, first_of_each_process
from jaxcoll._distribute.values.per_replica import DistributedValues, PerReplica, rows_over
from jaxcoll._distribute.values.ragged import known_shapes, parts_of
from jaxcoll._mesh.mesh import of_this_process
from jaxcoll._mesh.placement import is_array
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import check_reducible, where
from jaxcoll._spmd.gather import dimension
from jaxcoll._spmd.sparse import is_sparse


def reduce_along(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    value: Any,
    axis: Any,
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
) -> Any:
    """Reduce each replica's part along `axis`, and the results over the replicas.

    Law: it is the sum, or the mean, of all elements that fall together, whichever replica they
    are on: a mean is one sum and one division by their number.

    Args:
      ops: carries the sums from replica to replica.
      reduce_op: SUM or MEAN.
      value: a `PerReplica` or `Mirrored`, over `devices` or this process's share of them; or a
        list or tuple with an array for each replica of this process, whose sizes along `axis`
        may differ, from process to process too; or an array, which is one of each process.
      axis: a dimension, or a tuple or list of them, of each replica's part.
      devices: one for each replica.
      options: what carries the sums from replica to replica.

    Returns:
      The plain value, on this process's first device.

    Raises:
      ValueError: there is no such dimension, or the parts do not fit together.
    """
    here = of_this_process(devices)
    first = devices[here[0]]
    _check_dense(value)
    if isinstance(value, DistributedValues):
        value = value.settled()
        if len(here) == len(devices) or len(value) == len(devices):
            sums, counts = _sums_of_rows(reduce_op, value, axis)
            total = ops.reduce(ReduceOp.SUM, sums, first, options)
            if reduce_op is ReduceOp.SUM:
                return total
            return jax.tree.map(divided, total, counts, value.tree)
        if set(value.devices) != {devices[i] for i in here}:
            check_same_devices("reduce", value.devices, devices)
    elif is_array(value):
        if len(here) == len(devices):  # one that all replicas share, or zero
            shared = ops.broadcast(value, first)
            axes = dimensions_of(axis, shared.shape, "")
            return (jnp.mean if reduce_op is ReduceOp.MEAN else jnp.sum)(shared, axes)
        devices, value = first_of_each_process(devices), [value]
        here = of_this_process(devices)

    def parts_reduced(*leaves: Any) -> jax.Array:
        parts = dict(zip(here, parts_of("reduce", leaves, len(here)), strict=True))
        sums, count = _sums_of_parts(reduce_op, parts, axis, devices, options.timeout_seconds)
        total = ops.reduce(ReduceOp.SUM, sums, first, options)
        return total if reduce_op is ReduceOp.SUM else divided(total, count, parts[here[0]])

    if isinstance(value, DistributedValues):
        return jax.tree.map(parts_reduced, *value)
    return parts_reduced(*value)


def _check_dense(value: Any) -> None:
    tree = value.tree if isinstance(value, DistributedValues) else value
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(leaf):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"`reduce` along an axis expects dense arrays; {where(name)} is an IndexedSlices. "
                "Reduce it with axis None, or make it an array with `to_dense` first."
            )


def _sums_of_rows(reduce_op: ReduceOp, value: Any, axis: Any) -> tuple[Any, Any]:
    """Each replica's sums where they lie, and how many elements all replicas have in each."""
    shift = int(isinstance(value, PerReplica))
    flat, treedef = jax.tree_util.tree_flatten_with_path(value.tree)
    axes, counts = [], []
    for path, leaf in flat:
        name = jax.tree_util.keystr(path)
        check_reducible(name, leaf.dtype)
        found = dimensions_of(axis, leaf.shape[shift:], name)
        axes.append(tuple(k + shift for k in found))
        counts.append(len(value) * math.prod(leaf.shape[k + shift] for k in found))
    sharding = rows_over(value.devices) if shift else None
    program = local_sums(reduce_op, tuple(axes), sharding)
    sums = treedef.unflatten(program([leaf for _, leaf in flat]))
    return type(value).of(sums), treedef.unflatten(counts)


def _sums_of_parts(
    reduce_op: ReduceOp,
    parts: dict[int, Any],
    axis: Any,
    devices: tuple[jax.Device, ...],
    timeout_seconds: float | None,
) -> tuple[PerReplica, int]:
    """The sums of this process's parts, by replica, and how many elements all replicas have."""
    first = next(iter(parts.values()))
    check_reducible("", first.dtype)
    axes = dimensions_of(axis, first.shape, "")
    shapes = known_shapes("reduce", parts, devices, axes, timeout_seconds)
    program = local_sums(reduce_op, (axes,), None)

    def summed(replica: int) -> jax.Array:
        return program([jax.device_put(parts[replica], devices[replica])])[0]

    count = sum(math.prod(spec.shape[k] for k in axes) for spec in shapes)
    return PerReplica.from_function(summed, devices=devices), count


def dimensions_of(axis: Any, shape: Sequence[int], path: str) -> tuple[int, ...]:
    """The dimensions that `axis` names, counted from the first.

    Raises:
      ValueError: there is no such dimension, none is named, or one twice.
    """
    who = f"`reduce`: {where(path)}"
    axes = axis if isinstance(axis, tuple | list) else [axis]
    found = tuple(dimension(k, shape, who) for k in axes)
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"{who}: expected different axes, at least one; got {axis!r}.")
    return found


@functools.lru_cache(maxsize=256)
def local_sums(
    reduce_op: ReduceOp, axes: tuple[tuple[int, ...], ...], sharding: Any
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The sums of arrays along dimensions of their own, in the type in which a mean is made."""

    def sums(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            jnp.sum(x, k, dtype=_wide(x) if reduce_op is ReduceOp.MEAN else None)
            for x, k in zip(arrays, axes, strict=True)
        ]

    return jax.jit(sums, out_shardings=sharding)


def _mean_dtype(array: Any) -> np.dtype:
    """What a mean of `array` has: its own type, or of integers a float of JAX's choice."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype


def _wide(array: Any) -> np.dtype:
    """In which the sum of a mean of 16-bit floats does not overflow."""
    dtype = _mean_dtype(array)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def divided(total: jax.Array, count: int, part: Any) -> jax.Array:
    """The mean that has this sum, in the type of the mean of such a part."""
    return (total / count).astype(_mean_dtype(part))
