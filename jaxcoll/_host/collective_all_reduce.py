"""`CollectiveAllReduce`: the all-reduce of a fixed group of devices, with options of its own."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxcoll._host.all_reduce_ops import AllReduceCrossDeviceOps
from jaxcoll._host.all_reduce_program import Route
from jaxcoll._host.destinations import device_named
from jaxcoll._host.mesh import checked_devices
from jaxcoll._plan.options import CommunicationOptions, checked


class CollectiveAllReduce(AllReduceCrossDeviceOps):
    """All-reduces over the devices of a group, as its options say.

    Law: as of `AllReduceCrossDeviceOps`, but for the group's devices only, and packed, carried
    and bounded as `options` say, over which a call's own options go.

    Args:
      devices: this worker's devices, or device strings.
      group_size: devices of all workers together; of one worker, all there are here, the number
        of `devices`.
      options: defaults for every call.

    Raises:
      ValueError: `devices` are none or repeat; `group_size` is no multiple of their number, or
        one that takes several workers. On a call: a value that lies on other devices.

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
        found = [device_named(d, name) if isinstance(d, str) else d for d in devices]
        self._devices = checked_devices(found, name)
        count = len(self._devices)
        whole = isinstance(group_size, numbers.Integral) and not isinstance(group_size, bool)
        if not whole or group_size < 1 or group_size % count:
            raise ValueError(
                f"`group_size` must be a positive multiple of the number of devices, {count}, so "
                f"that every worker has as many; got {group_size!r}."
            )
        if group_size > count:
            raise ValueError(
                f"`group_size` {group_size} takes {group_size // count} workers of {count} "
                f"devices, but a group spans one process here: pass group_size={count}, or all "
                f"{group_size} devices."
            )
        self._options = checked(options)
        self._said = {"devices": list(map(str, found)), "group_size": int(group_size)}
        self._said |= {"options": self._options} if options else {}

    def _arranged(self, devices: tuple[jax.Device, ...]) -> tuple[Mesh, tuple[Route, ...]]:
        check_same_devices(type(self).__name__, devices, self._devices)
        mesh, _ = super()._arranged(self._devices)
        return mesh, (Route(),)


def check_same_devices(
    name: str, found: Sequence[jax.Device], expected: Sequence[jax.Device]
) -> None:
    """Refuse a value that lies on other devices than the cross-device op is for.

    Raises:
      ValueError: names both.
    """
    if set(found) != set(expected):
        raise ValueError(
            f"`{name}` reduces over its own {len(expected)} devices, "
            f"{', '.join(map(str, expected))}; got a value over {', '.join(map(str, found))}."
        )
