"""Reads the world, once for each traced program, so that no traced program has to."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np

from jaxcoll._dispatch.corruption_log import heard
from jaxcoll._dispatch.executable import remember
from jaxcoll._mesh.machine_costs import terms_here
from jaxcoll._plan.cost.clusters import Topology
from jaxcoll._plan.world import World
from jaxcoll._spmd.scope import Scope, current

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def scope_here() -> Scope:
    """The scope that a jaxcoll program set, or one read from JAX where there is none."""
    return current() or Scope(world=ambient_world, terms=terms_here, heard=heard)


def ambient_world(axes: dict[str, int]) -> World:
    """The world of a bare call inside somebody's own `shard_map`, `pmap` or `vmap`.

    A trace knows its mesh without the devices. Which axes leave the process is then read off
    the order that `jax.make_mesh` and `jax.devices()` use: processes one after another.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = str(getattr(device, "platform", None) or jax.default_backend())
    host_of = {d.process_index: _host(d) for d in jax.devices()}
    hosts = tuple(host_of.get(process, process) for process in range(jax.process_count()))
    kind = _kind(platform, getattr(device, "device_kind", None) or jax.devices()[0].device_kind)
    return _traced_world(_PLATFORMS.get(platform, platform), kind, hosts, axes)


def topology_scope(topology: Topology) -> Scope:
    """A scope for programs that are compiled for a cluster of which only the name is there."""
    kind = _kind(topology.platform, topology.kind)
    hosts = _hosts_of(topology)
    return Scope(world=functools.partial(_traced_world, topology.platform, kind, hosts))


def topology_world(topology: Topology, sizes: tuple[int, ...] = ()) -> World:
    """The world of a reduction over all of a cluster, along axes of these sizes; (): along one."""
    return World(
        topology.platform,
        sizes or (topology.size,),
        topology.hosts,
        device_kind=_kind(topology.platform, topology.kind),
        hosts=len(set(_hosts_of(topology))),
    )


def _hosts_of(topology: Topology) -> tuple[int, ...]:
    """The host of each process.

    Processes of one TPU slice, or of CPUs, count as one: no network of another kind is between
    them.
    """
    processes = range(topology.hosts)
    return tuple(processes) if topology.platform == "gpu" else (0,) * len(processes)


def _traced_world(
    platform: str, kind: str, host_of: tuple[int, ...], axes: dict[str, int]
) -> World:
    """The world around this point of a trace; `host_of` has the host of each process."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.axis_names):
        return World(platform, tuple(axes.values()), device_kind=kind)
    owners = np.arange(mesh.size) // (mesh.size // min(len(host_of), mesh.size))
    owners = owners.reshape(tuple(mesh.shape.values()))
    hosts = np.vectorize(lambda owner: host_of[owner], otypes=[int])(owners)
    return World(
        platform,
        tuple(axes.values()),
        _met(owners, tuple(mesh.axis_names), axes),
        partly_mapped=set(mesh.manual_axes) != set(mesh.axis_names),
        device_kind=kind,
        hosts=_met(hosts, tuple(mesh.axis_names), axes),
    )


def mesh_world(mesh: jax.sharding.Mesh, axes: dict[str, int]) -> World:
    """The world of a reduction over `axes` of a mesh whose devices are known."""
    platform = str(mesh.devices.flat[0].platform)
    owners = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    hosts = np.vectorize(_host, otypes=[int])(mesh.devices)
    return World(
        _PLATFORMS.get(platform, platform),
        tuple(axes.values()),
        _met(owners, mesh.axis_names, axes),
        device_kind=_kind(platform, mesh.devices.flat[0].device_kind),
        hosts=_met(hosts, mesh.axis_names, axes),
    )


def mesh_scope(mesh: jax.sharding.Mesh) -> Scope:
    """A scope for programs compiled for `mesh`; axes that it lacks (an inner `vmap`) are local."""

    @functools.cache
    def known(axes: tuple[tuple[str, int], ...]) -> World:
        here = {name: size for name, size in axes if name in mesh.axis_names}
        return dataclasses.replace(mesh_world(mesh, here), sizes=tuple(size for _, size in axes))

    return Scope(
        world=lambda axes: known(tuple(axes.items())),
        terms=terms_here,
        record=remember,
        heard=functools.partial(heard, devices=frozenset(mesh.devices.flat)),
    )


def _host(device: jax.Device) -> int:
    """Which host (TPU: slice) a device is on, as far as JAX tells; CPU processes share one."""
    if device.platform == "cpu":
        return 0
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def _kind(platform: str, device_kind: str | None) -> str:
    """What JAX calls the devices; of CPUs it knows no more than that they are."""
    return "" if platform == "cpu" else device_kind or ""


def _met(owners: np.ndarray, names: tuple[str, ...], axes: dict[str, int]) -> int:
    """Most owners met by any one group of devices that differ only along `axes`."""
    order = [names.index(a) for a in names if a not in axes] + [names.index(a) for a in axes]
    groups = owners.transpose(order).reshape(-1, math.prod(axes.values()) or 1)
    return max(len(np.unique(group)) for group in groups)
