"""Which devices a destination stands for."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.core import Tracer

from jaxcoll._host.values import DistributedValues

_SPELLING = re.compile(r"/?(?:device:)?([a-z]+):(\d+)", re.IGNORECASE)


def destination_devices(destinations: Any, caller: str) -> tuple[jax.Device, ...]:
    """The devices that a result is wanted on.

    Args:
      destinations: a `PerReplica` or `Mirrored` (its devices), a `jax.Array` (its devices), a
        device, or a device string as in `device_named`.
      caller: what is named in a message.

    Returns:
      The devices, in the order of the replicas where there are any.

    Raises:
      ValueError: it is something else, or names no device.
    """
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


def device_named(name: str, caller: str) -> jax.Device:
    """The device of this name.

    Args:
      name: `str(device)`; or platform and id, in any case, in TensorFlow's spellings:
        "cpu:0", "/gpu:1", "/device:GPU:1".
      caller: what is named in a message.

    Returns:
      The device; it may belong to another process.

    Raises:
      ValueError: no device has that name; the message lists those there are.

    Examples:
      >>> device_named("/device:CPU:3", "example")
      CpuDevice(id=3)
    """
    for device in jax.devices():
        if str(device) == name:
            return device
    spelled = _SPELLING.fullmatch(name)
    if spelled is None:
        raise ValueError(
            f'`{caller}` expects a device string such as "cpu:0", "gpu:1" or "/device:GPU:1"; '
            f"got {name!r}."
        )
    platform, number = spelled[1].lower(), int(spelled[2])
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    for device in devices:
        if device.id == number:
            return device
    known = ", ".join(map(str, devices or jax.devices()))
    raise ValueError(f"`{caller}` got {name!r}, but there is no such device. There are: {known}.")
