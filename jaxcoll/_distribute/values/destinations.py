"""Destinations of a value: the devices that they stand for, and copies there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxcoll._distribute.values.parts import Uneven
from jaxcoll._distribute.values.per_replica import DistributedValues, Mirrored, PerReplica
from jaxcoll._distribute.values.replica_axis import (
    AXIS,
    Step,
    copies_over,
    replicating,
    run_steps,
)
from jaxcoll._mesh.mesh import checked_devices, of_this_process, span_processes
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._spmd.broadcast import broadcast
from jaxcoll._spmd.scope import Scope

# "localhost" is what TensorFlow calls the only task of a program that is not distributed.
_SPELLING = re.compile(
    r"(?:/job:(?P<job>worker|localhost)(?:/replica:\d+)?/task:(?P<task>\d+)(?=/|$))?"
    r"(?:/?(?:device:)?(?P<platform>(?!job|task|replica)[a-z]+):(?P<number>\d+))?",
    re.IGNORECASE,
)


def destination_devices(destinations: Any, caller: str) -> tuple[jax.Device, ...]:
    """Return the devices that a result is wanted on, in the order of the replicas."""
    if isinstance(destinations, DistributedValues | Uneven):
        return destinations.devices
    if isinstance(destinations, jax.Array) and not isinstance(destinations, Tracer):
        return tuple(destinations.sharding.devices_indices_map(destinations.shape))
    if isinstance(destinations, jax.Device):
        return (destinations,)
    if isinstance(destinations, str):
        return (device_named(destinations, caller),)
    raise ValueError(
        f"`{caller}` expects destinations to be a PerReplica, a Mirrored, a jax.Array, a device "
        f'or a device string such as "cpu:0"; got {destinations!r} '
        f"({type(destinations).__name__}). For several devices, pass a value that lies on them, "
        "such as `Mirrored.from_function(lambda i: 0, devices=devices)`."
    )


def devices_named(devices: Sequence[Any], caller: str) -> tuple[jax.Device, ...]:
    """Return devices, or those of device strings in their place, none twice."""
    named = [device_named(d, caller) if isinstance(d, str) else d for d in devices]
    return checked_devices(named, caller)


def device_named(name: str, caller: str) -> jax.Device:
    """Return the device of this name, of whichever process.

    A name is `str(device)`, by which JAX tells the devices of all processes apart; or platform and
    number, in any case, in TensorFlow's spellings: "/gpu:1", "/device:GPU:1" of this process,
    "/job:worker/task:2/device:GPU:1" of process 2. Without a device it is the task's first.

    Raises:
      ValueError: no device has that name; the message lists those there are.
    """
    for device in jax.devices():
        if str(device) == name:
            return device
    spelled = _SPELLING.fullmatch(name)
    if spelled is None or not (spelled["platform"] or spelled["job"]):
        raise ValueError(
            f'`{caller}` expects a device string such as "cpu:0", "gpu:1", "/device:GPU:1" or '
            f'"/job:worker/task:0/device:GPU:1"; got {name!r}.'
        )
    platform, number = (spelled["platform"] or "").lower(), int(spelled["number"] or 0)
    try:
        devices = jax.devices(platform or None)
    except RuntimeError:
        devices = []
    # TensorFlow counts the devices of each task from 0, JAX's ids go on from process to process.
    named = (spelled["job"] or "").lower() == "worker"
    process = int(spelled["task"]) if named else jax.process_index()
    of_task = [device for device in devices if device.process_index == process]
    if number < len(of_task):
        return of_task[number]
    there = ", ".join(map(str, of_task or devices or jax.devices()))
    raise ValueError(f"`{caller}` got {name!r}, but there is no such device. There are: {there}.")


def delivered(result: Any, devices: tuple[jax.Device, ...]) -> Any:
    """Return a result on `devices`: a `Mirrored` over several, plain on one.

    A result that lies there already is not copied. Of another `Mirrored`, or of a plain result of
    this process, each process copies what it has to those devices that it owns; a process without
    any of them keeps its copy.
    """
    if isinstance(result, Mirrored):
        if len(devices) > 1 and result.devices == devices:
            return result
        if len(devices) > 1 and set(devices) == set(result.devices):
            return result.reordered(devices)
        result = copy_near(result, devices)
    here = [devices[i] for i in of_this_process(devices)]
    if not here:
        return result
    if len(devices) == 1:
        return jax.device_put(result, devices[0])
    sharding = copies_over(devices)

    def on_all(leaf: Any) -> jax.Array:
        parts = jax.device_put([leaf] * len(here), here)
        return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, parts)

    return Mirrored.of(jax.tree.map(on_all, result))


def broadcast_to(
    tree: Any, devices: tuple[jax.Device, ...], timeout_seconds: float | None = None
) -> Any:
    """Return a plain tree on `devices`; over several processes what the first device's passes."""
    if not span_processes(devices):
        check_here(devices[0])
        return delivered(tree, devices)
    # Processes may hold different values, which is no error here: hence rows, not copies.
    rows = Uneven(dict.fromkeys(of_this_process(devices), tree), devices).assembled()
    program = replicating("broadcast", devices, _from_the_first)
    options = CommunicationOptions(timeout_seconds=timeout_seconds)
    return run_steps([Step(program, rows, devices)], "`broadcast`", options)[0]


def _from_the_first(value: PerReplica, scope: Scope) -> Mirrored:
    return Mirrored.of(broadcast(value.tree, AXIS, source=0, scope=scope))


def check_here(device: jax.Device) -> None:
    """Refuse a device on which this process can put nothing."""
    if device.process_index != jax.process_index():
        raise ValueError(
            f"{device} belongs to process {device.process_index}, and this is process "
            f"{jax.process_index()}, whose devices are {', '.join(map(str, jax.local_devices()))}. "
            "Name one of these, or a value that lies on the devices of all processes."
        )


def copy_near(value: Mirrored, devices: tuple[jax.Device, ...]) -> Any:
    """Return the copy of `value` that lies on one of `devices`, or any, of this process."""
    here = of_this_process(value.devices)
    return value[next((i for i in here if value.devices[i] in devices), here[0])]
