"""`CollectiveAllReduce`: the all-reduce of a fixed group of devices, with options of its own."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxcoll._distribute.ops.all_reduce_ops import AllReduceCrossDeviceOps, is_count
from jaxcoll._distribute.ops.all_reduce_program import Route
from jaxcoll._distribute.values.device_names import devices_named
from jaxcoll._plan.options import CommunicationOptions, checked


class CollectiveAllReduce(AllReduceCrossDeviceOps):
    """All-reduces over the devices of a group, as its options say.

    Law: as of `AllReduceCrossDeviceOps`, but for the group's devices only, and packed, carried
    and bounded as `options` say; a call's own options take precedence. With several processes each
    passes what it holds, and gets the reduction of what all hold: see `CrossDeviceOps`.

    Args:
      devices: this worker's devices, or device strings.
      group_size: devices of all workers together: the number of `devices`, or, with several
        processes, the number of all devices.
      options: defaults for every call.

    Raises:
      ValueError: `devices` is empty or has one twice; `group_size` is not a multiple of their
        number, or takes more workers than there are. On a call: a value that lies on other devices.

    Examples:
      >>> import jax
      >>> ring = CommunicationOptions(implementation="ring")
      >>> ops = CollectiveAllReduce(jax.devices(), group_size=8, options=ring)
      >>> value = PerReplica.from_function(float)
      >>> ops.reduce("mean", value, value)[7].tolist()
      3.5
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str],
        group_size: int,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(num_packs=0)
        name = type(self).__name__
        self._group = found = devices_named(devices, name)
        count = len(found)
        if not is_count(group_size) or not group_size or group_size % count:
            raise ValueError(
                f"`group_size` must be a positive multiple of the number of devices, {count}, so "
                f"that every worker has as many; got {group_size!r}."
            )
        if group_size > count:
            self._group = _of_all_workers(self._group, int(group_size))
        self._options = checked(options)
        self._arguments = {"devices": list(map(str, found)), "group_size": int(group_size)}
        self._arguments |= {"options": self._options} if options else {}

    def _arranged(self, devices: tuple[jax.Device, ...]) -> tuple[Mesh, tuple[Route, ...]]:
        mesh, _ = super()._arranged(self._group if set(devices) == set(self._group) else devices)
        return mesh, (Route(),)


def _of_all_workers(devices: tuple[jax.Device, ...], group_size: int) -> tuple[jax.Device, ...]:
    """The devices of all processes, where those of this one are given.

    Raises:
      ValueError: other devices are given, or `group_size` is not the number of all.
    """
    every = jax.devices()
    if set(devices) != set(jax.local_devices()) or group_size != len(every):
        raise ValueError(
            f"`group_size` {group_size} takes {group_size // len(devices)} workers of "
            f"{len(devices)} devices; there {'is' if jax.process_count() == 1 else 'are'} "
            f"{jax.process_count()}, with {len(every)} devices together, "
            f"{len(jax.local_devices())} of them here. Pass group_size={len(devices)}, or this "
            f"process's devices and group_size={len(every)}."
        )
    return tuple(sorted(every, key=lambda device: (device.process_index, device.id)))
