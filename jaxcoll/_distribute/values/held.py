"""The parts of a value that this process holds, as parts of the value that all processes hold.

TensorFlow's workers pass what is theirs, and get the result of all. So does everything here that
has a group of devices: a value over this process's devices of the group is its share of one over
the whole group, and a plain value is one value of each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._mesh.mesh import of_this_process, span_processes


def of_all(
    name: str, value: PerReplica | Mirrored, group: tuple[jax.Device, ...]
) -> PerReplica | Mirrored:
    """`value` over all devices of `group`.

    Args:
      name: of the cross-device op or strategy, for messages.
      value: over the group; or over the devices of it that are this process's, while every other
        process brings its own. A `Mirrored` of one process counts as a row for each replica: the
        copies of other processes may differ from it.
      group: one device for each replica; (): the value's own.

    Returns:
      The value itself where it lies over the group already, or over the first device of each of
      its processes; else a `PerReplica` with the rows of all. Cost: rows of IndexedSlices are
      padded to the longest of all processes, which they tell one another.

    Raises:
      ValueError: it lies on other devices.
    """
    value = value.settled()
    found, spans = set(value.devices), span_processes(group)
    if not group or found == set(group) or (spans and found == set(first_of_each_process(group))):
        return value
    if not spans or found != {group[i] for i in of_this_process(group)}:
        check_same_devices(name, value.devices, group)
    position = {device: i for i, device in enumerate(value.devices)}
    return PerReplica.from_function(lambda i: value[position[group[i]]], devices=group)


def one_of_each_process(value: Any, group: tuple[jax.Device, ...]) -> PerReplica:
    """The plain values that the processes of `group` have, each on its first device of it."""
    return PerReplica.from_function(lambda _: value, devices=first_of_each_process(group))


def first_of_each_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """The first of each process's devices, in the order of `devices`."""
    first = {device.process_index: device for device in reversed(devices)}
    return tuple(device for device in devices if first[device.process_index] == device)


def check_same_devices(
    name: str, found: Sequence[jax.Device], expected: Sequence[jax.Device]
) -> None:
    """Refuse a value that lies on other devices than the cross-device op is for.

    Raises:
      ValueError: names both.
    """
    if set(found) != set(expected):
        share = (
            " Or pass a value over this process's share of them, as every process then does."
            if span_processes(expected)
            else ""
        )
        raise ValueError(
            f"`{name}` reduces over its own {len(expected)} devices, "
            f"{', '.join(map(str, expected))}; got a value over {', '.join(map(str, found))}."
            + share
        )
