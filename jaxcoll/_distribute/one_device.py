"""`ReductionToOneDevice`: bring every replica's value to one device, and add them there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll._dispatch.call import Call
from jaxcoll._distribute.arguments import copy_near, device_named
from jaxcoll._distribute.cross_device_ops import Batch, CrossDeviceOps, Reduction
from jaxcoll._distribute.per_replica import PerReplica
from jaxcoll._distribute.replica_axis import AXIS, without_row
from jaxcoll._mesh.mesh import line_of
from jaxcoll._mesh.world import mesh_scope
from jaxcoll._plan.checks import refuse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.packing import UNPACKED
from jaxcoll._spmd import reduce
from jaxcoll._spmd.sparse import check_dense

Accumulation = Callable[[list[jax.Array]], jax.Array]


class ReductionToOneDevice(CrossDeviceOps):
    """Copies every replica's value to one device, reduces there, copies the result onwards.

    Any destinations will do: more, fewer or other devices than the value lies on. The sum
    is made in one order every time, by one program compiled once for each shape.

    Of the options only `timeout_seconds` and `reproducible` have a meaning: nothing is packed, and
    copies and one addition leave no choice of implementation.

    Args:
      reduce_to_device: where to add: a device or a device string. None: the first destination.
      accumulation_fn: from the list of the replicas' arrays, leaf by leaf, to one of their
        shape and dtype; it is traced. None: their sum. A MEAN divides what it returns by the
        number of replicas, a SUM returns it.

    Raises:
      ValueError: `reduce_to_device` names no device; `accumulation_fn` is not callable. On a
        call, also: it returns another shape or dtype, or meets an IndexedSlices; a replica
        belongs to another process.

    Examples:
      >>> import jax.numpy as jnp
      >>> largest = ReductionToOneDevice(accumulation_fn=lambda xs: jnp.maximum(*xs))
      >>> value = PerReplica([1.0, 3.0])
      >>> [float(largest.reduce(op, value, "cpu:0")) for op in ("sum", "mean")]
      [3.0, 1.5]
    """

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Accumulation | None = None,
    ) -> None:
        if isinstance(reduce_to_device, str):
            reduce_to_device = device_named(reduce_to_device, "reduce_to_device")
        if not isinstance(reduce_to_device, jax.Device | None):
            refuse("reduce_to_device", "a device, a device string or None", reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            meaning = "a function from a list of arrays to an array, or None"
            refuse("accumulation_fn", meaning, accumulation_fn)
        self._reduce_to_device = reduce_to_device
        self._accumulation_fn = accumulation_fn

    def __repr__(self) -> str:
        return (
            f"ReductionToOneDevice(reduce_to_device={self._reduce_to_device}, "
            f"accumulation_fn={self._accumulation_fn})"
        )

    def _prepare(self, batch: Batch) -> list[tuple[Call, Sequence[Reduction]]]:
        return [(self._call(batch, reduction), [reduction]) for reduction in batch.reductions]

    def _call(self, batch: Batch, reduction: Reduction) -> Call:
        value, device = reduction.value, self._reduce_to_device or reduction.destinations[0]
        near = (device, *reduction.destinations)
        lie_on: tuple[Any, ...] = (*value.devices, *near)
        for other in lie_on:
            if other.process_index != jax.process_index():
                raise ValueError(
                    f"A reduction to one device copies between the devices of one process; "
                    f"{other} belongs to process {other.process_index}. Reduce to the value's own "
                    "devices with `NcclAllReduce` instead."
                )
        rows = isinstance(value, PerReplica)
        if isinstance(value, PerReplica):
            parts = [value.part(d) for d in value.devices]
        else:
            parts = [copy_near(value, near)] * len(value.devices)
        carried = CommunicationOptions(reproducible=batch.options.reproducible)
        program = one_device_program(device, batch.reduce_op, self._accumulation_fn, rows, carried)
        placed = (jax.device_put(parts, device),)
        return Call(program, placed, (device,), batch.name, batch.options)


@functools.lru_cache(maxsize=256)
def one_device_program(
    device: jax.Device,
    reduce_op: ReduceOp,
    accumulate: Accumulation | None,
    rows: bool,
    options: CommunicationOptions,
) -> Callable[[list[Any]], list[Any]]:
    """The reduction of a list of components on one device, compiled once for each shape."""
    scope = mesh_scope(line_of((device,), "device")).merged(options)

    def summed(components: list[Any]) -> Any:
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *components)
        # Replicas of a `vmap` share a device; so the arithmetic is that of every other reduction.
        replicas = jax.vmap(
            lambda x: reduce.all_reduce(reduce_op, x, AXIS, scope=scope, packing=UNPACKED),
            axis_name=AXIS,
        )(stacked)
        return jax.tree.map(lambda x: x[0], replicas)

    def program(components: list[Any]) -> list[Any]:
        if rows:
            components = without_row(components)
        if accumulate is None:
            return [summed(components)]
        check_dense(
            components[0],
            "`accumulation_fn` adds arrays, but {leaf} is an IndexedSlices, which is reduced by "
            "gathering its rows: reduce it without an `accumulation_fn`, or make it dense with "
            "`to_dense` first.",
        )
        accumulated = functools.partial(_accumulated, reduce_op, accumulate)
        return [jax.tree.map(accumulated, *components)]

    return jax.jit(program)


def _accumulated(reduce_op: ReduceOp, accumulate: Accumulation, *arrays: jax.Array) -> jax.Array:
    total = accumulate(list(arrays))
    expected = jax.typeof(arrays[0])
    shape, dtype = getattr(total, "shape", None), getattr(total, "dtype", None)
    if (shape, dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            "`accumulation_fn` must return an array like each of those it is given, "
            f"{expected.str_short()}; got {total!r}."
        )
    return total if reduce_op is ReduceOp.SUM else jnp.true_divide(total, len(arrays))
