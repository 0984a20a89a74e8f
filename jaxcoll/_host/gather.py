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

from jaxcoll._host.assemble import part_on
from jaxcoll._host.copies import copied, copy_near
from jaxcoll._host.deadline import prepared
from jaxcoll._host.mesh import line_of
from jaxcoll._host.placement import is_array
from jaxcoll._host.uneven import check_parts, parts_of
from jaxcoll._host.values import AXIS, Mirrored, PerReplica
from jaxcoll._host.world import mesh_scope
from jaxcoll._plan.leaves import where
from jaxcoll._plan.options import UNSET, CommunicationOptions
from jaxcoll._spmd import gather
from jaxcoll._spmd.sparse import is_sparse


def prepare_gather(
    value: Any, destinations: tuple[jax.Device, ...], axis: int, options: CommunicationOptions
) -> Callable[[], Any]:
    """Check everything that `CrossDeviceOps.gather` is given, and compile what it needs.

    Args:
      value: as in `CrossDeviceOps.gather`.
      destinations: where the result is wanted.
      axis: the dimension along which parts are joined.
      options: what carries it; a deadline that is set has the program compiled here.

    Returns:
      What dispatches it and returns the result.

    Raises:
      ValueError: as in `CrossDeviceOps.gather`.
    """
    if isinstance(value, PerReplica | Mirrored):
        value = value.settled()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value.tree, is_leaf=is_sparse):
            _check_dense(path, leaf)
            shape = leaf.shape[isinstance(value, PerReplica) :]
            gather.dimension(axis, shape, f"`gather`: {where(jax.tree_util.keystr(path))}")
        whole = len(value) > 1 and set(value.devices) == set(destinations)
        if isinstance(value, PerReplica) and whole:
            return _prepare_program(value, destinations, axis, options)
        parts, rows = _parts(value, destinations[0]), isinstance(value, PerReplica)
    else:
        parts, rows = _plain_parts(value, axis), False
    moved = jax.device_put(parts, destinations[0])
    run = prepared(_joining_program(axis, rows), options.timeout_seconds, (moved,))
    return lambda: copied(run(), destinations)


def _check_dense(path: Any, leaf: Any) -> None:
    if is_sparse(leaf):
        raise ValueError(
            f"`gather` expects dense arrays; {where(jax.tree_util.keystr(path))} is an "
            "IndexedSlices. `reduce` gathers the rows of all replicas, which is their sum; "
            "`to_dense` makes it an array."
        )


def _parts(value: PerReplica | Mirrored, device: jax.Device) -> list[Any]:
    """Every replica's part where it lies; of equal copies the nearest one."""
    if isinstance(value, Mirrored):
        return [copy_near(value, (device,))] * len(value)
    return [jax.tree.map(lambda x, d=d: part_on(x, d), value.tree) for d in value.devices]


def _plain_parts(value: Any, axis: int) -> list[Any]:
    """The arrays of a list, or the one array that is the value of one replica."""
    _check_dense((), value)
    if isinstance(value, list | tuple):
        parts = parts_of("gather", value)
    elif is_array(value):
        parts = [value if isinstance(value, jax.Array) else np.asarray(value)]
    else:
        raise ValueError(
            "`gather` expects a PerReplica, a Mirrored, an array, or a list or tuple with one "
            f"array for each replica; got {value!r} ({type(value).__name__})."
        )
    who = "`gather`: the part of replica 0" if len(parts) > 1 else "`gather`: the value"
    check_parts("gather", parts, [gather.dimension(axis, parts[0].shape, who)])
    return parts


def _prepare_program(
    value: PerReplica,
    destinations: tuple[jax.Device, ...],
    axis: int,
    options: CommunicationOptions,
) -> Callable[[], Mirrored]:
    carried = options.replace(timeout_seconds=UNSET)
    run = prepared(
        gather_program(value.devices, int(axis), carried),
        options.timeout_seconds,
        (value,),
        across=value.devices,
        told=repr((axis, carried)),
    )
    return lambda: run().reordered(destinations)


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
