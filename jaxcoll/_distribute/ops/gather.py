"""The gather between programs: one compiled all-gather where it can be one, copies elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run
from jaxcoll._distribute.values.assemble import part_on
from jaxcoll._distribute.values.held import first_of_each_process, of_all
from jaxcoll._distribute.values.per_replica import AXIS, Mirrored, PerReplica
from jaxcoll._distribute.values.ragged import check_parts, known_shapes, parts_of
from jaxcoll._distribute.values.replicate import check_here, copied, copy_near, delivered, spread
from jaxcoll._mesh.mesh import line_of, of_this_process, span_processes
from jaxcoll._mesh.placement import is_array
from jaxcoll._mesh.world import mesh_scope
from jaxcoll._plan.options import UNSET, CommunicationOptions
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd import gather
from jaxcoll._spmd.sparse import is_sparse


def gathered(
    name: str,
    value: Any,
    destinations: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
    group: tuple[jax.Device, ...],
) -> Any:
    """What `CrossDeviceOps.gather` does, checked and done.

    Args:
      name: of the cross-device op, for messages.
      value: as in `CrossDeviceOps.gather`.
      destinations: where the result is wanted.
      axis: the dimension along which parts are joined.
      options: what carries it; `timeout_seconds` bounds it.
      group: the devices that the op is for; (): any.

    Raises:
      NotImplementedError: a leaf is an `IndexedSlices`.
      ValueError: as in `CrossDeviceOps.gather`.
    """
    if isinstance(value, PerReplica | Mirrored):
        value = value.settled()
        _check_leaves(value, axis)
        here = {group[i] for i in of_this_process(group)}
        if span_processes(group) and set(value.devices) == here:
            return _gathered_held(name, list(value), destinations, axis, options, group)
        value = of_all(name, value, group)
        return _gathered_distributed(name, value, destinations, axis, options)
    parts = _plain_parts(value)
    if span_processes(group):
        if not isinstance(value, list | tuple):
            group = first_of_each_process(group)
        return _gathered_held(name, parts, destinations, axis, options, group)
    who = "`gather`: the part of replica 0" if len(parts) > 1 else "`gather`: the value"
    check_parts("gather", parts, [gather.dimension(axis, parts[0].shape, who)])
    return _gathered_copies(name, parts, False, destinations, axis, options)


def _gathered_distributed(
    name: str,
    value: PerReplica | Mirrored,
    destinations: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
) -> Any:
    """The gather of a value that lies over all its devices."""
    spans = span_processes(value.devices)
    if isinstance(value, PerReplica):
        if spans or (len(value) > 1 and set(value.devices) == set(destinations)):
            return _all_gathered(name, value, destinations, axis, options)
        parts = [jax.tree.map(lambda x, d=d: part_on(x, d), value.tree) for d in value.devices]
        return _gathered_copies(name, parts, True, destinations, axis, options)
    parts = [copy_near(value, destinations)] * len(value)
    if not spans:
        return _gathered_copies(name, parts, False, destinations, axis, options)
    here = value.devices[of_this_process(value.devices)[0]]
    return spread(_joined_on_one(name, parts, False, here, axis, options), destinations)


def _gathered_copies(
    name: str,
    parts: list[Any],
    rows: bool,
    destinations: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
) -> Any:
    """Parts joined on the first destination, and the result copied to the others."""
    if span_processes(destinations):
        raise ValueError(
            "`gather` copies between the devices of one process; over several, gather a value that "
            "lies on the devices of all, and take the copy of this process with `result[i]`."
        )
    check_here(destinations[0])
    return copied(_joined_on_one(name, parts, rows, destinations[0], axis, options), destinations)


def _joined_on_one(
    name: str,
    parts: list[Any],
    rows: bool,
    device: jax.Device,
    axis: int,
    options: CommunicationOptions,
) -> Any:
    """Parts joined on one device of this process."""
    moved = jax.device_put(parts, device)
    return run(Call(_joining_program(axis, rows), (moved,), (device,), f"`{name}.gather`", options))


def _gathered_held(
    name: str,
    parts: Sequence[Any],
    destinations: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
    group: tuple[jax.Device, ...],
) -> Any:
    """The parts that this process holds, joined with those of all others of the group.

    Args:
      name: of the cross-device op, for messages.
      parts: a tree for each replica of this process, whose sizes along `axis` may differ.
      destinations: where the result is wanted.
      axis: the dimension.
      options: what carries it.
      group: one device for each replica of all processes.
    """
    here = of_this_process(group)
    if len(parts) != len(here):
        parts_of("gather", parts, len(here))

    def joined(*leaves: Any) -> Any:
        held = dict(zip(here, leaves, strict=True))
        who = f"`gather`: the part of replica {here[0]}"
        k = gather.dimension(axis, np.shape(leaves[0]), who)
        shapes = known_shapes("gather", held, group, (k,), options.timeout_seconds)
        longest = max(spec.shape[k] for spec in shapes)

        def padded(replica: int) -> Any:
            part = held[replica]
            missing = longest - part.shape[k]
            if not missing:
                return part
            return jnp.pad(part, [(0, missing * (d == k)) for d in range(part.ndim)])

        rows = PerReplica.from_function(padded, devices=group)
        whole = copy_near(_all_gathered(name, rows, group, k, options), destinations)
        if all(spec.shape[k] == longest for spec in shapes):
            return whole
        pieces = [
            jax.lax.slice_in_dim(whole, i * longest, i * longest + spec.shape[k], axis=k)
            for i, spec in enumerate(shapes)
        ]
        return jnp.concatenate(pieces, k)

    return spread(jax.tree.map(joined, *parts), destinations)


def _check_leaves(value: PerReplica | Mirrored, axis: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(value.tree, is_leaf=is_sparse):
        _check_dense(path, leaf)
        shape = leaf.shape[isinstance(value, PerReplica) :]
        gather.dimension(axis, shape, f"`gather`: {where(jax.tree_util.keystr(path))}")


def _check_dense(path: Any, leaf: Any) -> None:
    if is_sparse(leaf):
        raise NotImplementedError(
            f"`gather` expects dense arrays; {where(jax.tree_util.keystr(path))} is an "
            "IndexedSlices. `reduce` gathers the rows of all replicas, which is their sum; "
            "`to_dense` makes it an array."
        )


def _plain_parts(value: Any) -> list[Any]:
    """The arrays of a list, or the one array that is the value of one replica."""
    _check_dense((), value)
    if isinstance(value, list | tuple):
        for i, part in enumerate(value):
            _check_dense((jax.tree_util.SequenceKey(i),), part)
        return parts_of("gather", value)
    if is_array(value):
        return [value if isinstance(value, jax.Array) else np.asarray(value)]
    raise ValueError(
        "`gather` expects a PerReplica, a Mirrored, an array, or a list or tuple with one "
        f"array for each replica; got {value!r} ({type(value).__name__})."
    )


def _all_gathered(
    name: str,
    value: PerReplica,
    destinations: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
) -> Any:
    """A value gathered to its own devices by one program, and taken to the destinations."""
    carried = options.replace(timeout_seconds=UNSET)
    program = gather_program(value.devices, int(axis), carried)
    settings = axis, carried
    call = Call(program, (value,), value.devices, f"`{name}.gather`", options, settings=settings)
    return delivered(run(call), destinations)


@functools.lru_cache(maxsize=256)
def gather_program(
    devices: tuple[jax.Device, ...], axis: int, options: CommunicationOptions
) -> Callable[[PerReplica], Mirrored]:
    """The all-gather of a value to its own devices, compiled once for each shape."""
    mesh = line_of(devices, AXIS)
    scope = dataclasses.replace(mesh_scope(mesh), options=options)

    def gathered(value: PerReplica) -> Mirrored:
        rows = jax.tree.map(lambda x: jnp.squeeze(x, 0), value.tree)
        return Mirrored.of(gather.all_gather(rows, AXIS, axis=axis, scope=scope))

    return jax.jit(
        jax.shard_map(
            gathered,
            mesh=mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
            check_vma=True,
        )
    )


@functools.lru_cache(maxsize=256)
def _joining_program(axis: int, rows: bool) -> Callable[[Sequence[Any]], Any]:
    """The joining of parts that lie on one device; rows have a leading dimension of one."""

    def joined(parts: Sequence[Any]) -> Any:
        if rows:
            parts = jax.tree.map(lambda x: jnp.squeeze(x, 0), parts)
        return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *parts)

    return jax.jit(joined)
