"""Reads the world, once for each traced program, so that no traced program has to."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np

from jaxcoll._plan.topology import Topology
from jaxcoll._plan.world import World
from jaxcoll._spmd.scope import Scope, current

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def scope_here() -> Scope:
    """The scope that a jaxcoll program set, or one read from JAX where there is none."""
    return current() or Scope(world=ambient_world)


def ambient_world(axes: dict[str, int]) -> World:
    """The world of a bare call inside somebody's own `shard_map`, `pmap` or `vmap`.

    A trace knows its mesh without the devices. Which axes leave the process is then read off
    the order that `jax.make_mesh` and `jax.devices()` use: processes one after another.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = str(getattr(device, "platform", None) or jax.default_backend())
    return _traced_world(_PLATFORMS.get(platform, platform), jax.process_count(), axes)


def topology_scope(topology: Topology) -> Scope:
    """A scope for programs that are compiled for a cluster of which only the name is there."""
    world = functools.partial(_traced_world, topology.platform, topology.hosts)
    return Scope(world=world)


def _traced_world(platform: str, hosts: int, axes: dict[str, int]) -> World:
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.axis_names):
        return World(platform, tuple(axes.values()))
    owners = np.arange(mesh.size) // (mesh.size // min(hosts, mesh.size))
    return World(
        platform,
        tuple(axes.values()),
        _processes(owners.reshape(tuple(mesh.shape.values())), tuple(mesh.axis_names), axes),
        partly_mapped=set(mesh.manual_axes) != set(mesh.axis_names),
    )


def mesh_world(mesh: jax.sharding.Mesh, axes: dict[str, int]) -> World:
    """The world of a reduction over `axes` of a mesh whose devices are known."""
    platform = str(mesh.devices.flat[0].platform)
    owners = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    return World(
        _PLATFORMS.get(platform, platform),
        tuple(axes.values()),
        _processes(owners, mesh.axis_names, axes),
    )


def mesh_scope(mesh: jax.sharding.Mesh) -> Scope:
    """A scope for programs compiled for `mesh`; axes that it lacks (an inner `vmap`) are local."""

    @functools.cache
    def known(axes: tuple[tuple[str, int], ...]) -> World:
        here = {name: size for name, size in axes if name in mesh.axis_names}
        world = mesh_world(mesh, here)
        return World(world.platform, tuple(size for _, size in axes), world.processes)

    return Scope(world=lambda axes: known(tuple(axes.items())))


def _processes(owners: np.ndarray, names: tuple[str, ...], axes: dict[str, int]) -> int:
    """Most processes met by any one group of devices that differ only along `axes`."""
    order = [names.index(a) for a in names if a not in axes] + [names.index(a) for a in axes]
    groups = owners.transpose(order).reshape(-1, math.prod(axes.values()) or 1)
    return max(len(np.unique(group)) for group in groups)
