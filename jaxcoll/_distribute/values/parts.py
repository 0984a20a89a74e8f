"""Parts of a value, one for each replica, that are in no global array yet, or never can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._distribute.values.assemble import check_structures
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica, is_distributed
from jaxcoll._distribute.values.replica_axis import known_to_all
from jaxcoll._mesh.mesh import of_this_process, span_processes
from jaxcoll._mesh.placement import host_array, is_array
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd.sparse import is_sparse

_MOST = 32  # dimensions of an array, and letters of a dtype's name


class Uneven(tuple):
    """One array for each replica of this process, of a shape of its own, on its replica's device.

    JAX treats it as a leaf. `gather` and `reduce` along an axis interpret any list or tuple of
    arrays as one; this class tells it from a tuple of values.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Uneven({', '.join(f'{x.dtype.name}{[*x.shape]}' for x in self)})"


def has_parts(value: Any) -> bool:
    """Whether `value` is one value with a part for each replica, as far as one can see."""
    return is_distributed(value) or is_sparse(value) or _is_list(value)


def check_no_list(caller: str, path: str, value: Any) -> None:
    """Refuse a list or tuple of plain values where they could be parts, or a tree of values."""
    if _is_list(value):
        raise ValueError(
            f"`{caller}` with axis None got {where(path)} as a {type(value).__name__} of "
            f"{len(value)} plain values, which could be one for each replica, or values that "
            "every replica shares. Parts of the replicas are a `PerReplica`; shared values are "
            "reduced one at a time, or in a dictionary."
        )


def _is_list(value: Any) -> bool:
    """Whether `value` is a list or tuple of plain values; one with names is a tree."""
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return plain and bool(value) and all(map(is_array, value))


def parts_of(caller: str, value: Sequence[Any], replicas: int | None = None) -> list[Any]:
    """The arrays of a list or tuple that has one for each replica; `replicas` None: any number."""
    who = f"`{caller}` interprets a list or tuple as one array per replica"
    if not value or (replicas is not None and len(value) != replicas):
        raise ValueError(f"{who}; expected {replicas or 'one or more'}, got {len(value)}.")
    for i, part in enumerate(value):
        if not is_array(part):
            raise ValueError(
                f"{who}; the part of replica {i} is {part!r} ({type(part).__name__}). Trees go "
                "inside a `PerReplica`."
            )
    return [*map(host_array, value)]


def check_parts(caller: str, parts: Sequence[Any], axes: Sequence[int]) -> None:
    """Refuse parts that differ in dtype, rank, or along any dimension but `axes`."""
    first = parts[0]
    kept = [k for k in range(first.ndim) if k not in axes]
    along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"
    for i, part in enumerate(parts):
        if part.ndim != first.ndim or any(part.shape[k] != first.shape[k] for k in kept):
            raise ValueError(
                f"`{caller}` expects parts that differ in size along {along} only; replica {i} "
                f"has shape {part.shape}, replica 0 {first.shape}."
            )
        if part.dtype != first.dtype:
            raise ValueError(
                f"`{caller}` expects one dtype; replica {i} has {part.dtype}, replica 0 "
                f"{first.dtype}."
            )


def distributed(values: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> Any:
    """A tree with a `PerReplica` in the place of each leaf, or an `Uneven` where shapes differ."""
    first, *_ = values
    structures = {i: jax.tree.structure(v, is_leaf=is_sparse) for i, v in values.items()}
    check_structures("experimental_distribute_values_from_function", structures)
    leaves = (jax.tree.leaves(value, is_leaf=is_sparse) for value in values.values())
    columns = (dict(zip(values, column, strict=True)) for column in zip(*leaves, strict=True))
    return structures[first].unflatten([_column(column, devices) for column in columns])


def _column(parts: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> PerReplica | Uneven:
    alike = len({np.shape(part) for part in parts.values() if is_array(part)}) < 2
    if alike:
        return PerReplica.from_function(parts.__getitem__, devices=devices)
    arrays = parts_of("experimental_distribute_values_from_function", [*parts.values()])
    return Uneven(jax.device_put(x, devices[i]) for i, x in zip(parts, arrays, strict=True))


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
    def of_plain(cls, caller: str, value: Any, devices: tuple[jax.Device, ...]) -> Self:
        """A list or tuple of parts, as above; or a value of one replica for each process."""
        if not isinstance(value, list | tuple):
            value, devices = [value], first_of_each_process(devices)
        parts = parts_of(caller, value, len(of_this_process(devices)))
        return cls.of_process(parts, devices)

    def assembled(self) -> PerReplica:
        """The value of all replicas. Parts have one shape, but rows of IndexedSlices are padded."""
        return PerReplica.from_function(self.parts.__getitem__, devices=self.devices)

    def shapes(
        self,
        caller: str,
        axes: Sequence[Sequence[int]],
        timeout_seconds: float | None,
        settings: str,
    ) -> list[list[jax.ShapeDtypeStruct]]:
        """For each leaf the shape and dtype of every replica's part, known to all processes.

        `axes` are, for each leaf, the only dimensions along which its parts may differ, from 0:
        parts that differ otherwise are refused on every process. `settings`: see `known_to_all`.
        """
        # One exchange for all leaves: it is a round trip, whatever it carries.
        facts = {
            i: [_facts(caller, leaf) for leaf in jax.tree.leaves(part)]
            for i, part in self.parts.items()
        }
        table = known_to_all(facts, self.devices, caller, timeout_seconds, settings)
        found = [[*map(_shape_of, column)] for column in table.swapaxes(0, 1).tolist()]
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
