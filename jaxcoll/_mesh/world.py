"""Reads the world, once for each traced program, so that no traced program has to."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np

from jaxcoll._cluster.hosts import Hosts, hosts_of_job
from jaxcoll._dispatch.corruption_log import Reports
from jaxcoll._dispatch.executable import remember
from jaxcoll._mesh.machine_costs import MachineCosts, costs_here
from jaxcoll._plan.cost.clusters import Topology
from jaxcoll._plan.world import World
from jaxcoll._spmd.scope import Scope, current

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def scope_here() -> Scope:
    """The scope that a jaxcoll program set, or one read from JAX where there is none."""
    return current() or Scope(
        world=ambient_world, terms=_costs_of_bare_calls(hosts_of_job()), heard=Reports()
    )


@functools.cache
def _costs_of_bare_calls(hosts: Hosts) -> MachineCosts:
    """Read at the first trace of a call in a user's own program, above which nobody stands.

    Once for each job: a process that stays in an elastic one must plan as those that join it.
    """
    return dataclasses.replace(costs_here(), hosts=hosts)


def ambient_world(axes: dict[str, int]) -> World:
    """The world of a bare call inside somebody's own `shard_map`, `pmap` or `vmap`.

    A trace knows its mesh without the devices. Which axes leave the process is then read off
    the order that `jax.make_mesh` and `jax.devices()` use: processes one after another.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = str(getattr(device, "platform", None) or jax.default_backend())
    of_processes = hosts_of_job().of_processes
    host_of = {d.process_index: _host(d, of_processes) for d in jax.devices()}
    hosts = tuple(host_of.get(process, process) for process in range(jax.process_count()))
    kind = _kind(platform, getattr(device, "device_kind", None) or jax.devices()[0].device_kind)
    return _TracedWorlds(_PLATFORMS.get(platform, platform), kind, hosts)(axes)


def topology_scope(topology: Topology) -> Scope:
    """A scope for programs that are compiled for a cluster of which only the name is there."""
    kind = _kind(topology.platform, topology.kind)
    return Scope(world=_TracedWorlds(topology.platform, kind, _hosts_of(topology)))


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


@dataclasses.dataclass(frozen=True)
class _TracedWorlds:
    """The worlds of reductions over the mesh around a trace, whose devices are not there."""

    platform: str
    kind: str
    host_of: tuple[int, ...]  # each process

    def __call__(self, axes: dict[str, int]) -> World:
        mesh = jax.sharding.get_abstract_mesh()
        if not set(axes) <= set(mesh.axis_names):
            return World(self.platform, tuple(axes.values()), device_kind=self.kind)
        processes = min(len(self.host_of), mesh.size)
        owners = np.arange(mesh.size) * processes // mesh.size
        hosts = np.take(self.host_of, owners)
        here = _MeshWorlds(
            self.platform,
            self.kind,
            tuple(mesh.shape.items()),
            tuple(owners.tolist()),
            tuple(hosts.tolist()),
        )
        partly = set(mesh.manual_axes) != set(mesh.axis_names)
        return dataclasses.replace(here(axes), partly_mapped=partly)


@dataclasses.dataclass(frozen=True)
class _MeshWorlds:
    """The worlds of reductions over axes of one mesh; axes that it lacks are local."""

    platform: str
    kind: str
    shape: tuple[tuple[str, int], ...]
    processes: tuple[int, ...]  # of each device, in the mesh's order
    hosts: tuple[int, ...]  # likewise

    def __call__(self, axes: dict[str, int]) -> World:
        hosts, inner = self._met(self.hosts, axes), 0
        if hosts > 1 and set(axes) <= set(dict(self.shape)):
            alone = (self._met(self.hosts, {axis: axes[axis]}) == 1 for axis in reversed(axes))
            inner = sum(1 for _ in itertools.takewhile(bool, alone))
        return World(
            self.platform,
            tuple(axes.values()),
            self._met(self.processes, axes),
            device_kind=self.kind,
            hosts=hosts,
            inner=inner,
        )

    def _met(self, owners: tuple[int, ...], axes: dict[str, int]) -> int:
        """Most owners met by any one group of devices that differ only along `axes`."""
        names = [name for name, _ in self.shape]
        within = [names.index(a) for a in axes if a in names]
        # The axes of the reduction last: each row of the matrix is then one of its groups.
        order = [i for i in range(len(names)) if i not in within] + within
        sizes = [size for _, size in self.shape]
        grid = np.reshape(owners, sizes).transpose(order)
        groups = grid.reshape(-1, math.prod(sizes[i] for i in within))
        return max(len(np.unique(group)) for group in groups)


def mesh_world(mesh: jax.sharding.Mesh, axes: dict[str, int]) -> World:
    """The world of a reduction over `axes` of a mesh whose devices are known."""
    return _worlds_of(mesh)(axes)


def mesh_scope(mesh: jax.sharding.Mesh) -> Scope:
    """A scope for programs compiled for `mesh`; axes that it lacks (an inner `vmap`) are local."""
    return Scope(
        world=_worlds_of(mesh),
        terms=costs_here(),
        record=remember,
        heard=Reports(frozenset(mesh.devices.flat)),
    )


def _worlds_of(mesh: jax.sharding.Mesh) -> _MeshWorlds:
    devices = list(mesh.devices.flat)
    platform, of_processes = str(devices[0].platform), hosts_of_job().of_processes
    return _MeshWorlds(
        _PLATFORMS.get(platform, platform),
        _kind(platform, devices[0].device_kind),
        tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True)),
        tuple(d.process_index for d in devices),
        tuple(_host(device, of_processes) for device in devices),
    )


def _host(device: jax.Device, of_processes: tuple[int, ...]) -> int:
    """Which host (TPU: slice) a device is on, as far as JAX tells, and the job of CPU processes."""
    if device.platform == "cpu":
        return of_processes[device.process_index] if len(of_processes) > 1 else 0
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def _kind(platform: str, device_kind: str | None) -> str:
    """What JAX calls the devices; of CPUs it knows no more than that they are."""
    return "" if platform == "cpu" else device_kind or ""
