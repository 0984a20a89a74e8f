"""Reads the world, once for each traced program, so that no traced program has to."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable

import jax
import numpy as np

from jaxcoll._cluster.hosts import Hosts, hosts_of_job
from jaxcoll._dispatch.executable import remember
from jaxcoll._mesh.machine_costs import MachineCosts, costs_here
from jaxcoll._observe.parse.replica_groups import mesh_groups
from jaxcoll._plan.cost.clusters import Topology
from jaxcoll._plan.world import World
from jaxcoll._spmd.scope import Scope, entered


def scope_here() -> Scope:
    """The scope that a jaxcoll program set, or one read from JAX where there is none."""
    return entered.value or Scope(world=ambient_world, terms=_costs_of_bare_calls(hosts_of_job()))


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
    known = _hosts(jax.devices())
    kind = getattr(device, "device_kind", None) or jax.devices()[0].device_kind
    hosts = tuple((process, known.get(process, process)) for process in range(jax.process_count()))
    return _Worlds(*_named(platform, kind), hosts)(axes)


def topology_scope(topology: Topology) -> Scope:
    """A scope for programs that are compiled for a cluster of which only the name is there."""
    # Processes of one TPU slice, or of CPUs, count as one host: no network of another kind is
    # between them.
    hosts = tuple((k, k * (topology.platform == "gpu")) for k in range(topology.hosts))
    return Scope(world=_Worlds(*_named(topology.platform, topology.kind), hosts))


def topology_world(topology: Topology, sizes: tuple[int, ...] = ()) -> World:
    """The world of a reduction over all of a cluster, along axes of these sizes; (): along one."""
    return World(
        topology.platform,
        sizes or (topology.size,),
        topology.hosts,
        device_kind=_named(topology.platform, topology.kind)[1],
        hosts=topology.hosts if topology.platform == "gpu" else 1,
    )


@dataclasses.dataclass(frozen=True)
class _Worlds:
    """The worlds of reductions over axes of one mesh; axes that it lacks are local."""

    platform: str
    kind: str
    host_of: tuple[tuple[int, int], ...]  # each process, and its host
    # Without these, the mesh around a trace, whose devices are not there
    shape: tuple[tuple[str, int], ...] = ()
    owners: tuple[int, ...] = ()  # the process of each device, in the mesh's order

    def __call__(self, axes: dict[str, int]) -> World:
        shape, owners, partly = dict(self.shape), np.array(self.owners), False
        if not self.owners:
            mesh = jax.sharding.get_abstract_mesh()
            shape = dict(mesh.shape) if set(axes) <= set(mesh.axis_names) else {}
            partly = bool(shape) and set(mesh.manual_axes) != set(shape)
            size = math.prod(shape.values())
            owners = np.arange(size) * min(len(self.host_of), size) // size
        host_of = dict(self.host_of)
        host_of_device = np.array([host_of[process] for process in owners.tolist()])
        hosts, inner = _met(host_of_device, shape, axes), 0
        if hosts > 1 and set(axes) <= set(shape):
            alone = (_met(host_of_device, shape, [axis]) == 1 for axis in reversed(axes))
            inner = sum(1 for _ in itertools.takewhile(bool, alone))
        return World(
            self.platform,
            tuple(axes.values()),
            _met(owners, shape, axes),
            partly,
            self.kind,
            hosts,
            inner,
        )


def _met(owners: np.ndarray, shape: dict[str, int], axes: Iterable[str]) -> int:
    """Most owners met by any one group of devices that differ only along `axes` of a mesh."""
    groups = mesh_groups(shape, owners, [(axis, 1, None) for axis in axes if axis in shape])
    return max(len(set(group)) for group in groups)


def mesh_world(mesh: jax.sharding.Mesh, axes: dict[str, int]) -> World:
    """The world of a reduction over `axes` of a mesh whose devices are known."""
    return _worlds_of(mesh)(axes)


def mesh_scope(mesh: jax.sharding.Mesh) -> Scope:
    """A scope for programs compiled for `mesh`; axes that it lacks (an inner `vmap`) are local."""
    return Scope(world=_worlds_of(mesh), terms=costs_here(), record=remember)


def _worlds_of(mesh: jax.sharding.Mesh) -> _Worlds:
    devices = list(mesh.devices.flat)
    return _Worlds(
        *_named(str(devices[0].platform), devices[0].device_kind),
        tuple(_hosts(devices).items()),
        tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True)),
        tuple(d.process_index for d in devices),
    )


def _hosts(devices: Iterable[jax.Device]) -> dict[int, int]:
    """The host (TPU: slice) of each process, as far as JAX tells, and the job of CPU processes."""
    of_processes = hosts_of_job().of_processes
    return {d.process_index: _host(d, of_processes) for d in devices}


def _host(device: jax.Device, of_processes: tuple[int, ...]) -> int:
    if device.platform == "cpu":
        return of_processes[device.process_index] if len(of_processes) > 1 else 0
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def _named(platform: str, device_kind: str) -> tuple[str, str]:
    """The platform in our words, and what JAX calls the devices; of CPUs that says no more."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform), device_kind * (platform != "cpu")
