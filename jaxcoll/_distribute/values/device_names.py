"""The devices that a destination, or a device string, stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxcoll._distribute.values.per_replica import DistributedValues
from jaxcoll._mesh.mesh import checked_devices

# "localhost" is what TensorFlow calls the only task of a program that is not distributed.
_SPELLING = re.compile(
    r"(?:/job:(?P<job>worker|localhost)(?:/replica:\d+)?/task:(?P<task>\d+)(?=/|$))?"
    r"(?:/?(?:device:)?(?P<platform>(?!job|task|replica)[a-z]+):(?P<number>\d+))?",
    re.IGNORECASE,
)


def destination_devices(destinations: Any, caller: str) -> tuple[jax.Device, ...]:
    """The devices that a result is wanted on, in the order of the replicas where there are any."""
    if isinstance(destinations, DistributedValues):
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
    """Devices, or device strings in their place, as different devices."""
    found = [device_named(d, caller) if isinstance(d, str) else d for d in devices]
    return checked_devices(found, caller)


def device_named(name: str, caller: str) -> jax.Device:
    """The device of this name, of whichever process.

    A name is `str(device)`, by which JAX tells the devices of all processes apart; or platform and
    number, in any case, in TensorFlow's spellings: "/gpu:1", "/device:GPU:1" of this process,
    "/job:worker/task:2/device:GPU:1" of process 2. Without a device it is the task's first.

    Raises:
      ValueError: no device has that name; the message lists those there are.

    Examples:
      >>> device_named("/job:worker/replica:0/task:0/device:CPU:3", "example")
      CpuDevice(id=3)
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
    known = ", ".join(map(str, of_task or devices or jax.devices()))
    raise ValueError(f"`{caller}` got {name!r}, but there is no such device. There are: {known}.")
