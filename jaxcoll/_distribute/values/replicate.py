"""Copies of one value on its destinations."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._distribute.values.replica_axis import AXIS, copies_over, replicating
from jaxcoll._mesh.mesh import of_this_process, span_processes
from jaxcoll._mesh.placement import place
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._spmd.broadcast import broadcast
from jaxcoll._spmd.scope import Scope


def copied(tree: Any, devices: tuple[jax.Device, ...], timeout_seconds: float | None = None) -> Any:
    """`tree` on one device, or a `Mirrored` of it on several.

    Over several processes all of them call it, and what the first device's process holds is
    copied; `timeout_seconds` bounds that.
    """
    if len(devices) == 1:
        check_here(devices[0])
        return jax.device_put(tree, devices[0])
    if span_processes(devices):
        # Processes may hold different values, which is no error here: hence rows, not copies.
        rows = PerReplica.from_function(lambda _: tree, devices=devices)
        options = CommunicationOptions(timeout_seconds=timeout_seconds)
        program = replicating("broadcast", devices, _from_the_first)
        return run(Call(program, (rows,), devices, "`broadcast`", options))
    return Mirrored.of(place(tree, copies_over(devices)))


def spread(copy: Any, devices: tuple[jax.Device, ...]) -> Any:
    """A value of which every process has a copy, on `devices`: each fills those that it owns.

    It is a `Mirrored` over several, plain on one. A process without any of them keeps its copy.
    """
    here = [devices[i] for i in of_this_process(devices)]
    if not here:
        return copy
    if not span_processes(devices):
        return copied(copy, devices)
    sharding = copies_over(devices)

    def on_all(leaf: Any) -> jax.Array:
        parts = jax.device_put([leaf] * len(here), here)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return Mirrored.of(jax.tree.map(on_all, copy))


def delivered(value: Mirrored, devices: tuple[jax.Device, ...]) -> Any:
    """A result on the devices where it is wanted: in place, or each process's copy `spread`."""
    if set(devices) == set(value.devices):
        return value.reordered(devices)
    return spread(copy_near(value, devices), devices)


def check_here(device: jax.Device) -> None:
    """Refuse a device on which this process can put nothing."""
    if device.process_index != jax.process_index():
        raise ValueError(
            f"{device} belongs to process {device.process_index}, and this is process "
            f"{jax.process_index()}, whose devices are {', '.join(map(str, jax.local_devices()))}. "
            "Name one of these, or a value that lies on the devices of all processes."
        )


def _from_the_first(value: PerReplica, scope: Scope) -> Mirrored:
    """What the first device holds, on all."""
    return Mirrored.of(broadcast(value.tree, AXIS, source=0, scope=scope))


def copy_near(value: Mirrored, devices: tuple[jax.Device, ...]) -> Any:
    """The copy of `value` that lies on one of `devices`, or any, of this process."""
    here = of_this_process(value.devices)
    return value[next((i for i in here if value.devices[i] in devices), here[0])]
