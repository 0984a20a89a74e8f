"""What a strategy does between programs when its replicas belong to several processes.

Every process makes the same calls, each with what it holds, and each gets the result on a device
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._host.along_axis import dimensions_of, divided, local_sums
from jaxcoll._host.copies import of_here
from jaxcoll._host.cross_device_ops import CrossDeviceOps
from jaxcoll._host.mesh import of_this_process
from jaxcoll._host.nccl_all_reduce import NcclAllReduce
from jaxcoll._host.placement import is_array
from jaxcoll._host.uneven import check_parts, parts_of
from jaxcoll._host.values import DistributedValues, PerReplica
from jaxcoll._plan.leaves import check_reducible
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._spmd.gather import dimension


def reduce_between(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    values: Sequence[Any],
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
) -> list[Any]:
    """Reduce some values over their replicas, and plain ones over the processes.

    Args:
      ops: reduces what lies on all of `devices`.
      reduce_op: SUM or MEAN.
      values: `PerReplica`s, `Mirrored`s; or arrays and numbers, one of each process.
      devices: one a replica.
      options: how to communicate.

    Returns:
      Plain arrays, each on a device of this process.
    """
    workers = _first_of_each_process(devices)
    held = [v if isinstance(v, DistributedValues) else _of_workers(v, workers) for v in values]
    plain = [i for i, v in enumerate(values) if not isinstance(v, DistributedValues)]
    others = [i for i, v in enumerate(values) if isinstance(v, DistributedValues)]
    results: dict[int, Any] = {}
    for some, by in ((others, ops), (plain, NcclAllReduce())):
        reduced = by.batch_reduce(reduce_op, [(held[i], held[i]) for i in some], options)
        results.update(zip(some, reduced, strict=True))
    return [of_here(results[i]) for i in range(len(values))]


def gather_between(
    ops: CrossDeviceOps,
    value: Any,
    devices: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
) -> Any:
    """Join the replicas' values along one dimension, in replica order.

    Args:
      ops: gathers what lies on all of `devices`.
      value: a `PerReplica` or `Mirrored`; or a list or tuple with an array for each replica of
        this process, whose sizes along `axis` may differ, between processes too.
      devices: one a replica.
      axis: the dimension.
      options: how to communicate.

    Returns:
      Plain arrays, on a device of this process.

    Raises:
      ValueError: parts differ in dtype, rank or another dimension; on every process.
    """
    if isinstance(value, DistributedValues):
        return of_here(ops.gather(value, value, axis, options))
    here = of_this_process(devices)
    parts = dict(zip(here, parts_of("gather", value, len(here)), strict=True))
    shapes = _agreed_shapes(ops, "gather", parts, devices, (axis,), options)
    k = dimension(axis, shapes[0].shape, "`gather`: the part of replica 0")
    longest = max(spec.shape[k] for spec in shapes)

    def padded(replica: int) -> Any:
        part = parts[replica]
        missing = [(0, (longest - part.shape[k]) * (d == k)) for d in range(part.ndim)]
        return jnp.pad(part, missing)

    rows = PerReplica.from_function(padded, devices=devices)
    whole = of_here(ops.gather(rows, rows, k, options))
    pieces = [
        jax.lax.slice_in_dim(whole, i * longest, i * longest + spec.shape[k], axis=k)
        for i, spec in enumerate(shapes)
    ]
    return jnp.concatenate(pieces, k)


def reduce_along_between(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    value: Any,
    axis: Any,
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
) -> Any:
    """Reduce parts of unequal sizes along `axis`, and the results over the replicas.

    Args:
      ops: reduces what lies on all of `devices`.
      reduce_op: SUM or MEAN.
      value: an array of each process; or a list or tuple with an array for each replica of this
        process.
      axis: a dimension, or several, of each part.
      devices: one a replica.
      options: how to communicate.

    Returns:
      A plain array, on a device of this process.

    Raises:
      ValueError: there is no such dimension, or the parts do not fit together; on every process.
    """
    if is_array(value):
        devices, ops, value = _first_of_each_process(devices), NcclAllReduce(), [value]
    here = of_this_process(devices)
    parts = dict(zip(here, parts_of("reduce", value, len(here)), strict=True))
    first = parts[here[0]]
    check_reducible("", first.dtype)
    axes = dimensions_of(axis, first.shape, "")
    shapes = _agreed_shapes(ops, "reduce", parts, devices, axes, options)
    sums = PerReplica.from_function(
        lambda i: local_sums(reduce_op, (axes,), None)([parts[i]])[0], devices=devices
    )
    total = of_here(ops.reduce(ReduceOp.SUM, sums, sums, options))
    if reduce_op is ReduceOp.SUM:
        return total
    return divided(total, sum(int(np.prod([s.shape[k] for k in axes])) for s in shapes), first)


def _first_of_each_process(devices: tuple[jax.Device, ...]) -> tuple[jax.Device, ...]:
    first = {device.process_index: device for device in reversed(devices)}
    return tuple(device for device in devices if first[device.process_index] == device)


def _of_workers(value: Any, workers: tuple[jax.Device, ...]) -> PerReplica:
    return PerReplica.from_function(lambda _: value, devices=workers)


def _agreed_shapes(
    ops: CrossDeviceOps,
    caller: str,
    parts: dict[int, Any],
    devices: tuple[jax.Device, ...],
    axes: Sequence[int],
    options: CommunicationOptions,
) -> list[jax.ShapeDtypeStruct]:
    """The shape and dtype of every replica's part, which differ along `axes` only."""
    most = 16

    def told(replica: int) -> np.ndarray:
        part = parts[replica]
        name = part.dtype.name.encode().ljust(most)[:most]
        shape = (part.ndim, *part.shape, *[0] * (most - part.ndim))
        return np.array([*shape, *name], np.int32)[None]

    rows = PerReplica.from_function(told, devices=devices)
    found = []
    for row in np.asarray(of_here(ops.gather(rows, rows, 0, options))).tolist():
        rank, dtype = row[0], bytes(row[most + 1 :]).decode().strip()
        found.append(jax.ShapeDtypeStruct(tuple(row[1 : rank + 1]), np.dtype(dtype)))
    check_parts(caller, found, [k % max(1, len(found[0].shape)) for k in axes])
    return found
