"""Small facts of each replica, made known to all processes before a program depends on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run
from jaxcoll._mesh.mesh import line_of, of_this_process
from jaxcoll._mesh.world import mesh_scope
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._spmd.gather import all_gather

_AXIS = "replica"


def known_to_all(
    facts: Mapping[int, Sequence[int]],
    devices: tuple[jax.Device, ...],
    what: str,
    timeout_seconds: float | None = None,
) -> np.ndarray:
    """A row of integers for each replica, of which each process brings those of its replicas.

    Args:
      facts: rows of 32-bit integers, all of one length, by replica: of this process's replicas.
      devices: one for each replica. If all are of this process nothing is sent.
      what: what is named in a message.
      timeout_seconds: bounds the wait for the other processes.

    Returns:
      The rows of all replicas, in their order. Cost: one all-gather of them.
    """
    here = of_this_process(devices)
    rows = [np.asarray(facts[i], np.int32)[None] for i in here]
    if len(here) == len(devices):
        return np.concatenate(rows)
    parts = jax.device_put(rows, [devices[i] for i in here])
    sharding = NamedSharding(line_of(devices, _AXIS), PartitionSpec(_AXIS))
    shape = (len(devices), *rows[0].shape[1:])
    table = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    options = CommunicationOptions(timeout_seconds=timeout_seconds)
    result = run(Call(_program(devices), (table,), devices, f"`{what}`", options, settings=what))
    return np.asarray(result.addressable_data(0))


@functools.lru_cache(maxsize=256)
def _program(devices: tuple[jax.Device, ...]) -> Callable[[jax.Array], jax.Array]:
    mesh = line_of(devices, _AXIS)
    scope = dataclasses.replace(mesh_scope(mesh), options=CommunicationOptions())

    def exchange(row: jax.Array) -> jax.Array:
        return all_gather(row, _AXIS, axis=0, scope=scope)

    return jax.jit(
        jax.shard_map(exchange, mesh=mesh, in_specs=PartitionSpec(_AXIS), out_specs=PartitionSpec())
    )
