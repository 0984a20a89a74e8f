"""Values as users pass them to an op or a strategy: one path to what all replicas hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import jax
from jax.core import Tracer

from jaxcoll._distribute.values.assemble import (
    array_of,
    assembled,
    check_alike,
    check_structures,
    described,
    own_devices,
)
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica, is_distributed
from jaxcoll._distribute.values.replica_axis import shapes_of_all
from jaxcoll._mesh.mesh import no_mesh, of_this_process, span_processes
from jaxcoll._mesh.placement import host_array, is_array
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.sparse import is_sparse


@final
class Uneven:
    """One value for each replica whose shapes may differ, so that no global array holds it.

    Every process holds the parts of its own replicas. JAX treats it as a leaf. `gather` and
    `reduce` along an axis take it, and interpret a list or tuple of arrays as one.
    """

    __slots__ = ("devices", "parts")

    def __init__(self, parts: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> None:
        self.parts = parts  # pytrees of arrays, by replica
        self.devices = devices  # one for each replica, of all processes

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, replica: int) -> Any:
        if replica in self.parts:
            return self.parts[replica]
        raise IndexError(
            f"This process has the parts of replicas {', '.join(map(str, self.parts))}; got "
            f"{replica!r}."
        )

    def __repr__(self) -> str:
        shapes = (f"{i}: {x.dtype.name}{[*x.shape]}" for i, x in self.parts.items())
        return f"Uneven({', '.join(shapes)})"

    def assembled(self) -> PerReplica:
        """Return the value of all replicas; the program that takes it compares the shapes."""
        return PerReplica.of(
            assembled("PerReplica", self.devices, self.parts.__getitem__, rows=True, exchange=False)
        )


def has_parts(value: Any) -> bool:
    """Return true for one value with a part for each replica, as far as one can see."""
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
    """Return true for a list or tuple of plain values; one with names is a tree."""
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return plain and bool(value) and all(map(is_array, value))


def taken(
    caller: str,
    name: str,
    value: Any,
    group: tuple[jax.Device, ...],
    device: jax.Device,
) -> PerReplica | Mirrored | Uneven:
    """Return a value of all replicas, or this process's parts of one, from what a user passes.

    Args:
      caller: the call, for messages.
      name: the op or strategy, for messages.
      value: a `PerReplica`, `Mirrored` or `Uneven` over the group, over this process's devices of
        it, or over the first device of each process; or a plain value, which is that of one
        replica, and over several processes one of each.
      group: the devices of every value, one for each replica; (): any.
      device: where a plain value that lies on no device goes.

    Raises:
      ValueError: it is something else, or lies on other devices.
    """
    if isinstance(value, PerReplica | Mirrored | Uneven):
        return _over_group(name, value, group)
    if isinstance(value, Tracer):
        refuse_traced(caller)
    if is_sparse(value):
        value.check(f"`{caller}`")
    elif not is_array(value):
        raise ValueError(
            f"`{caller}` expects a PerReplica, a Mirrored, an array or a number; got {value!r} "
            f"({type(value).__name__}). `PerReplica` takes a list with each replica's value."
        )
    elif isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        raise ValueError(
            f"`{caller}` got an array over {len(value.sharding.device_set)} devices, which "
            "does not say what it is: `PerReplica.from_global` takes it for one row for each "
            "replica, `Mirrored.from_global` for one copy for each."
        )
    if span_processes(group):
        firsts = first_of_each_process(group)
        (replica,) = of_this_process(firsts)
        return Uneven({replica: value if is_sparse(value) else host_array(value)}, firsts)
    if isinstance(value, jax.Array):
        return Mirrored.from_global(value)
    if device.process_index != jax.process_index():  # the op refuses it, or has a use for it
        device = jax.local_devices()[0]
    return Mirrored([value], devices=own_devices([value]) or [device])


def listed(caller: str, value: Sequence[Any], devices: tuple[jax.Device, ...]) -> Uneven:
    """Return a list or tuple as one array for each replica of this process on `devices`.

    Raises:
      ValueError: it has another number of them, or something else.
    """
    interpretation = f"`{caller}` interprets a list or tuple as one array per replica"
    replicas = of_this_process(devices)
    if len(value) != len(replicas):
        raise ValueError(f"{interpretation}; expected {len(replicas)}, got {len(value)}.")
    for i, part in enumerate(value):
        if isinstance(part, Tracer):
            refuse_traced(caller)
        if not is_array(part):
            raise ValueError(
                f"{interpretation}; the part of replica {i} is {part!r} ({type(part).__name__}). "
                "Trees go inside a `PerReplica`."
            )
    return Uneven(dict(zip(replicas, map(host_array, value), strict=True)), devices)


def refuse_traced(caller: str) -> None:
    """Refuse a value that is being traced.

    Raises:
      ValueError: always.
    """
    raise ValueError(
        f"`{caller}` got a value that is being traced, so it lies on no device. Call it "
        "between programs; inside one, `jc.all_reduce` and its like deal with the value that "
        "the replica holds."
    )


def of_all(
    name: str, value: PerReplica | Mirrored, group: tuple[jax.Device, ...]
) -> PerReplica | Mirrored:
    """Return `value` over all devices of `group`, of which every process may pass its parts."""
    of_group = _over_group(name, value, group)
    return of_group.assembled() if isinstance(of_group, Uneven) else of_group


def _over_group(
    name: str, value: PerReplica | Mirrored | Uneven, group: tuple[jax.Device, ...]
) -> PerReplica | Mirrored | Uneven:
    """Return `value` if it lies over all of `group`; else this process's parts of one that does.

    TensorFlow's workers pass what is theirs, and get the result of all. A `Mirrored` of one process
    counts as a row for each replica: the copies of other processes may differ from it.

    Raises:
      ValueError: it lies on other devices.
    """
    if not isinstance(value, Uneven):
        value = value.settled()
    devices = value.devices
    if not group or devices == group:
        return value
    lies_on, spans = set(devices), span_processes(group)
    if lies_on == set(group) or (spans and lies_on == set(first_of_each_process(group))):
        return value
    own = of_this_process(group)
    if spans and lies_on == {group[i] for i in own}:
        part_on = dict(zip(devices, value, strict=True))
        return Uneven({i: part_on[group[i]] for i in own}, group)
    hint = " Or pass a value over this process's share of them, as every process then does."
    raise ValueError(
        f"`{name}` reduces over its own {len(group)} devices, {', '.join(map(str, group))}; got a "
        f"value over {', '.join(map(str, devices))}." + hint * spans
    )


def first_of_each_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Return the first of each process's devices, in the order of `devices`."""
    first = {device.process_index: device for device in reversed(devices)}
    return tuple(device for device in devices if first[device.process_index] == device)


def distributed(caller: str, values: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> Any:
    """Return a tree with a `PerReplica` for each leaf, or an `Uneven` where shapes differ.

    `values` are the trees of this process's replicas. All processes exchange shapes, so that each
    leaf is of one kind on all of them.
    """
    flat, treedef = flattened(next(iter(values.values())), is_sparse)
    check_structures(caller, values)
    rows = {
        i: [
            leaf if is_sparse(leaf) else array_of(caller, i, path, leaf)
            for (path, _), leaf in zip(flat, treedef.flatten_up_to(value), strict=True)
        ]
        for i, value in values.items()
    }
    dense = {i: [leaf for leaf in row if not is_sparse(leaf)] for i, row in rows.items()}
    shapes = iter(shapes_of_all(caller, dense, devices, described(next(iter(values.values())))))
    leaves: list[PerReplica | Uneven] = []
    for (path, first), *parts in zip(flat, *rows.values(), strict=True):
        leaf = Uneven(dict(zip(rows, parts, strict=True)), devices)
        if is_sparse(first):
            leaves.append(leaf.assembled())
            continue
        of_leaf = next(shapes)
        if len({shape.shape for shape in of_leaf.values()}) == 1:
            check_alike(caller, path, of_leaf)
            leaves.append(leaf.assembled())
        else:
            with no_mesh():
                placed = jax.device_put(parts, [devices[i] for i in rows])
            leaves.append(Uneven(dict(zip(rows, placed, strict=True)), devices))
    return treedef.unflatten(leaves)
