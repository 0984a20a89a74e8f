"""Copies of one value on its destinations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcoll._host.mesh import line_of, of_this_process, span_processes
from jaxcoll._host.placement import place
from jaxcoll._host.values import AXIS, Mirrored, PerReplica, copies_over
from jaxcoll._host.world import mesh_scope
from jaxcoll._spmd.broadcast import broadcast


def copied(tree: Any, devices: tuple[jax.Device, ...]) -> Any:
    """`tree` on one device, or a `Mirrored` of it on several.

    Over several processes all of them call it, and what the first device's process holds is
    copied.
    """
    if len(devices) == 1:
        return jax.device_put(tree, devices[0])
    if span_processes(devices):
        return _from_the_first(devices)(PerReplica.from_function(lambda _: tree, devices=devices))
    return Mirrored.of(place(tree, copies_over(devices)))


@functools.lru_cache(maxsize=256)
def _from_the_first(devices: tuple[jax.Device, ...]) -> Callable[[PerReplica], Mirrored]:
    """The program that gives every device what the first one holds."""
    mesh = line_of(devices, AXIS)
    scope = mesh_scope(mesh)

    def program(value: PerReplica) -> Mirrored:
        rows = jax.tree.map(lambda x: jnp.squeeze(x, 0), value.tree)
        return Mirrored.of(broadcast(rows, AXIS, source=0, scope=scope))

    program.__name__ = "broadcast"  # what messages show
    return jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec())
    )


def copy_near(value: Mirrored, devices: tuple[jax.Device, ...]) -> Any:
    """The copy of `value` that lies on one of `devices`, or any, of this process."""
    here = of_this_process(value.devices)
    return value[next((i for i in here if value.devices[i] in devices), here[0])]


def of_here(value: Any) -> Any:
    """The copy of a `Mirrored` that this process can reach; anything else as it is."""
    return copy_near(value, ()) if isinstance(value, Mirrored) else value
