"""The simplest op: everything is copied to one device, and reduced there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.scope import Scope, resolve_axes
from jaxcoll._collectives.sparse import check_dense
from jaxcoll._plan.checks import refuse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import accumulation_dtype
from jaxcoll._plan.packs.packing import UNPACKED
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import remember
from jaxcoll._step.mesh.mesh import make_line
from jaxcoll._step.mesh.world import make_worlds
from jaxcoll.distribute._arguments import copy_near, device_named
from jaxcoll.distribute._cross_device_ops import (
    Batch,
    CrossDeviceOps,
    Reduction,
    check_own_devices,
)
from jaxcoll.distribute._replica_axis import AXIS, drop_row

Accumulation = Callable[[list[jax.Array]], jax.Array]


class ReductionToOneDevice(CrossDeviceOps):
    """Copies every replica's value to one device, reduces there, and copies the result onwards.

    Destinations may be more, fewer or other devices than those of the value. The order of summation
    is always the same. The program is compiled once for each shape.

    Only the options `timeout_seconds` and `reproducible` have an effect: nothing is packed, and
    there is only one algorithm.

    Args:
      reduce_to_device: the device to reduce on, or its device string. None: the first destination.
      accumulation_fn: a function from a list of the replicas' arrays, of one leaf, to an array of
        the same shape and dtype; it is traced. None: the sum. A MEAN divides its result by the
        number of replicas, a SUM does not.

    Raises:
      ValueError: `reduce_to_device` names no device; `accumulation_fn` is not callable. On a
        call, also: it returns another shape or dtype, or a leaf is an IndexedSlices; a replica
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
        shown = None if reduce_to_device is None else str(reduce_to_device)
        self._arguments = {"reduce_to_device": shown, "accumulation_fn": accumulation_fn}

    def _prepare(self, batch: Batch) -> list[tuple[Call, Sequence[Reduction]]]:
        return [(self._call(batch, reduction), [reduction]) for reduction in batch.reductions]

    def _call(self, batch: Batch, reduction: Reduction) -> Call:
        value, device = reduction.value, self._reduce_to_device or reduction.destinations[0]
        check_own_devices([*value.devices, device])
        if value._rows:
            parts = [value._part(d) for d in value.devices]
        else:
            # A value that is the same everywhere counts once for each replica, as in all
            # reductions.
            parts = [copy_near(value, (device,))] * len(value.devices)
        # Of all options only the order of the sum matters: what travels is the values themselves.
        options = CommunicationOptions(reproducible=batch.options.reproducible)
        program = one_device_program(
            device, batch.reduce_op, self._accumulation_fn, value._rows, options
        )
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
    """Make a program that reduces a list of components on one device, compiled once per shape."""
    scope = Scope(make_worlds(make_line((device,), "device")), record=remember).merge(options)

    def sum_replicas(components: list[Any]) -> Any:
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *components)

        # Replicas of a `vmap` share a device, and their arithmetic is that of all reductions.
        def reduce(x: Any) -> Any:
            axes = resolve_axes(AXIS, "all_reduce")
            return AllReduce(reduce_op, axes, scope, packing=UNPACKED).reduce(x)

        return jax.tree.map(lambda x: x[0], jax.vmap(reduce, axis_name=AXIS)(stacked))

    def program(components: list[Any]) -> list[Any]:
        if rows:
            components = drop_row(components)
        if accumulate is None:
            return [sum_replicas(components)]
        check_dense(
            components[0],
            "`accumulation_fn` adds arrays, but {leaf} is an IndexedSlices. Reduce it without an "
            "`accumulation_fn`, or make it dense with `to_dense` first.",
        )
        return [jax.tree.map(functools.partial(_accumulate, reduce_op, accumulate), *components)]

    return jax.jit(program)


def _accumulate(reduce_op: ReduceOp, accumulate: Accumulation, *arrays: jax.Array) -> jax.Array:
    if reduce_op is ReduceOp.MEAN and jnp.issubdtype(arrays[0].dtype, jnp.integer):
        arrays = tuple(x.astype(accumulation_dtype(x.dtype)) for x in arrays)
    total = accumulate(list(arrays))
    expected = jax.typeof(arrays[0])
    shape, dtype = getattr(total, "shape", None), getattr(total, "dtype", None)
    if (shape, dtype) != (expected.shape, expected.dtype):
        like = f"like each of its arguments, {expected.str_short()}"
        raise ValueError(f"`accumulation_fn` must return an array {like}; got {total!r}.")
    return total if reduce_op is ReduceOp.SUM else jnp.true_divide(total, len(arrays))
