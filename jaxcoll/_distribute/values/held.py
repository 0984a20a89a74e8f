"""The parts of a value that this process holds, and the rest, which other processes hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._distribute.values.ragged import check_parts
from jaxcoll._distribute.values.replica_axis import known_to_all
from jaxcoll._mesh.mesh import of_this_process, span_processes

_MOST = 32  # dimensions of an array, and letters of a dtype's name


@dataclasses.dataclass(frozen=True)
class Held:
    """This process's parts of a value; every other process of `devices` brings its own."""

    parts: Mapping[int, Any]  # pytrees of arrays, by replica, whose shapes may differ
    devices: tuple[jax.Device, ...]  # one for each replica, of all processes

    @classmethod
    def of_process(cls, parts: Sequence[Any], devices: tuple[jax.Device, ...]) -> Self:
        """One part for each replica of this process."""
        return cls(dict(zip(of_this_process(devices), parts, strict=True)), devices)

    @classmethod
    def of_each_process(cls, value: Any, devices: Sequence[jax.Device]) -> Self:
        """The plain values that processes have: one replica on the first device of each."""
        first = first_of_each_process(devices)
        return cls(dict.fromkeys(of_this_process(first), value), first)

    def assembled(self) -> PerReplica:
        """The value of all replicas. Parts have one shape, but rows of IndexedSlices are padded."""
        return PerReplica.from_function(self.parts.__getitem__, devices=self.devices)

    def shapes(
        self, caller: str, axes: Sequence[Sequence[int]], timeout_seconds: float | None
    ) -> list[list[jax.ShapeDtypeStruct]]:
        """For each leaf the shape and dtype of every replica's part, known to all processes.

        `axes` are, for each leaf, the only dimensions along which its parts may differ, from 0:
        parts that differ otherwise are refused on every process.
        """
        # One exchange for all leaves: it is a round trip, whatever it carries.
        facts = {
            i: [fact for leaf in jax.tree.leaves(part) for fact in _facts(caller, leaf)]
            for i, part in self.parts.items()
        }
        table = known_to_all(facts, self.devices, caller, timeout_seconds)
        found = [
            [_shape_of(row) for row in table[:, k : k + 2 * _MOST + 1].tolist()]
            for k in range(0, table.shape[1], 2 * _MOST + 1)
        ]
        for parts, own in zip(found, axes, strict=True):
            check_parts(caller, parts, own)
        return found


def held(
    name: str, value: PerReplica | Mirrored, group: tuple[jax.Device, ...]
) -> PerReplica | Mirrored | Held:
    """`value` if it lies over all of `group`; else this process's parts of one that does.

    TensorFlow's workers pass what is theirs, and get the result of all. So it is here for whatever
    has a group of devices, one for each replica; (): any. A value over the first device of each
    process of the group is one of all, too. A `Mirrored` of one process counts as a row for each
    replica: the copies of other processes may differ from it.

    Raises:
      ValueError: it lies on other devices.
    """
    value = value.settled()
    found, spans = set(value.devices), span_processes(group)
    if not group or found == set(group) or (spans and found == set(first_of_each_process(group))):
        return value
    own = [group[i] for i in of_this_process(group)]
    if spans and found == set(own):
        part_of = dict(zip(value.devices, value, strict=True))
        return Held.of_process([part_of[device] for device in own], group)
    hint = " Or pass a value over this process's share of them, as every process then does."
    raise ValueError(
        f"`{name}` reduces over its own {len(group)} devices, {', '.join(map(str, group))}; got a "
        f"value over {', '.join(map(str, value.devices))}." + hint * spans
    )


def of_all(
    name: str, value: PerReplica | Mirrored, group: tuple[jax.Device, ...]
) -> PerReplica | Mirrored:
    """`value` over all devices of `group`, of which every process may pass its parts only."""
    found = held(name, value, group)
    return found.assembled() if isinstance(found, Held) else found


def first_of_each_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """The first of each process's devices, in the order of `devices`."""
    first = {device.process_index: device for device in reversed(devices)}
    return tuple(device for device in devices if first[device.process_index] == device)


def _facts(caller: str, part: Any) -> list[int]:
    """The shape and dtype of an array, in as many integers for each."""
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"`{caller}` expects arrays; a part is a typed PRNG key. Pass its "
            "`jax.random.key_data`."
        )
    name = part.dtype.name.encode().ljust(_MOST)
    # Every process must send as many integers, before it knows whether they agree.
    return [part.ndim, *part.shape, *[0] * (_MOST - part.ndim), *name]


def _shape_of(facts: Sequence[int]) -> jax.ShapeDtypeStruct:
    dtype = bytes(facts[_MOST + 1 :]).decode().strip()
    return jax.ShapeDtypeStruct(tuple(facts[1 : facts[0] + 1]), jnp.dtype(dtype))
