"""Copies of one value on its destinations."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll._host.placement import place
from jaxcoll._host.values import Mirrored, copies_over


def copied(tree: Any, devices: tuple[jax.Device, ...]) -> Any:
    """`tree` on one device, or a `Mirrored` of it on several."""
    if len(devices) == 1:
        return jax.device_put(tree, devices[0])
    return Mirrored.of(place(tree, copies_over(devices)))


def copy_near(value: Mirrored, devices: tuple[jax.Device, ...]) -> Any:
    """The copy of `value` that lies on one of `devices`, or any."""
    common = (i for i, device in enumerate(value.devices) if device in devices)
    return value[next(common, 0)]
