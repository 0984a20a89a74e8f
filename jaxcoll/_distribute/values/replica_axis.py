"""The mesh axis of the replicas: how values lie along it, and programs that exchange along it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run
from jaxcoll._mesh.mesh import line_of, of_this_process
from jaxcoll._mesh.scopes import mesh_scope
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._spmd.gather import all_gather
from jaxcoll._spmd.scope import Scope

AXIS = "replica"
"""The mesh axis along which every distributed value lies."""


@functools.lru_cache(maxsize=1024)
def rows_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """One row of the leading dimension on each device."""
    return NamedSharding(line_of(devices, AXIS), PartitionSpec(AXIS))


@functools.lru_cache(maxsize=1024)
def copies_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """One complete copy on each device."""
    return NamedSharding(line_of(devices, AXIS), PartitionSpec())


def without_row(tree: Any) -> Any:
    """The arrays of one replica, inside a program that maps the rows over the replicas."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


@functools.lru_cache(maxsize=256)
def replicating(
    name: str,
    devices: tuple[jax.Device, ...],
    body: Callable[..., Any],
    options: CommunicationOptions = CommunicationOptions(),
    *more: Hashable,
) -> Callable[[Any], Any]:
    """A program from one row on each device to one result on all, compiled once for each shape.

    `body` goes from the tree of one replica, a scope, and `more`, to an *invariant* tree.
    """
    mesh = line_of(devices, AXIS)
    scope = dataclasses.replace(mesh_scope(mesh), options=options)

    def program(rows: Any) -> Any:
        return body(without_row(rows), scope, *more)

    program.__name__ = name
    return jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec())
    )


def known_to_all(
    facts: Mapping[int, Sequence[Any] | np.ndarray],
    devices: tuple[jax.Device, ...],
    what: str,
    timeout_seconds: float | None = None,
    settings: str = "",
) -> np.ndarray:
    """A table of integers for each replica, of which each process brings those of its replicas.

    A program depends on such facts (lengths, say) before all processes can compile the same one.
    If all devices belong to this process, nothing is sent. All tables have one shape, and integers
    of 32 bits. `settings` is a text that all processes must have in common; "": `what`.
    """
    here = of_this_process(devices)
    rows = [np.asarray(facts[i], np.int32)[None] for i in here]
    if len(here) == len(devices):
        return np.concatenate(rows)
    parts = jax.device_put(rows, [devices[i] for i in here])
    shape = (len(devices), *rows[0].shape[1:])
    table = jax.make_array_from_single_device_arrays(shape, rows_over(devices), parts)
    options = CommunicationOptions(timeout_seconds=timeout_seconds)
    name, settings = f"`{what}`", settings or what
    program = replicating("exchange", devices, _every_row)
    result = run(Call(program, (table,), devices, name, options, settings=settings))
    return np.asarray(result.addressable_data(0))


def _every_row(row: jax.Array, scope: Scope) -> jax.Array:
    return all_gather(row[None], AXIS, axis=0, scope=scope)
