"""The world of a reduction: the platform, processes and hosts behind its axes, read from JAX."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax
import numpy as np

from jaxcoll._collectives.scope import Scope, set_default_scope
from jaxcoll._job.hosts import hosts_of_job
from jaxcoll._plan.world import World


def ambient_world(axes: dict[str, int]) -> World:
    """Describe the world of a call inside a user's own `shard_map`, `pmap` or `vmap`.

    A trace has its mesh without devices. It is assumed to have the order of `jax.make_mesh` and
    `jax.devices()`, one process after another, which shows the axes that span processes.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = str(getattr(device, "platform", None) or jax.default_backend())
    kind = getattr(device, "device_kind", None) or jax.local_devices()[0].device_kind
    hosts = ((0, 0),)
    if jax.process_count() > 1:
        host_of = _hosts(jax.devices())
        hosts = tuple((p, host_of.get(p, p)) for p in range(jax.process_count()))
    return Worlds(*platform_and_kind(platform, kind), hosts)(axes)


def mesh_world(mesh: jax.sharding.Mesh, axes: dict[str, int]) -> World:
    """Describe the world of a reduction over `axes` of a mesh whose devices are known."""
    return make_worlds(mesh)(axes)


def make_worlds(mesh: jax.sharding.Mesh) -> Worlds:
    """Describe the worlds of reductions in programs for `mesh`; axes that it lacks are local."""
    devices = list(mesh.devices.flat)
    return Worlds(
        *platform_and_kind(str(devices[0].platform), devices[0].device_kind),
        tuple(_hosts(devices).items()),
        tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True)),
        tuple(d.process_index for d in devices),
    )


@dataclasses.dataclass(frozen=True)
class Worlds:
    """The worlds of reductions over axes of one mesh: a function that is hashable by value."""

    platform: str
    kind: str
    host_of: tuple[tuple[int, int], ...]  # pairs of a process and its host
    # Empty for the mesh of the current trace, which has no devices
    shape: tuple[tuple[str, int], ...] = ()
    owners: tuple[int, ...] = ()  # the process of each device, in the mesh's order

    def __call__(self, axes: dict[str, int]) -> World:
        shape, owners, partly = dict(self.shape), np.array(self.owners), False
        if not self.owners:
            mesh = jax.sharding.get_abstract_mesh()
            shape = dict(mesh.shape) if set(axes) <= set(mesh.axis_names) else {}
            partly = bool(shape) and set(mesh.manual_axes) != set(shape)
            size = math.prod(shape.values())
            # A mesh without devices: each process has as many as the others, one after another.
            owners = np.arange(size) * min(len(self.host_of), size) // size
        sizes = tuple(axes.values())
        if len(self.host_of) == 1:
            return World(self.platform, sizes, 1, partly, self.kind)
        host_of = dict(self.host_of)
        hosts = np.array([host_of[process] for process in owners.tolist()])
        count, inner = _most(hosts, shape, axes), 0
        if count > 1 and set(axes) <= set(shape):
            alone = (_most(hosts, shape, [axis]) == 1 for axis in reversed(axes))
            inner = sum(1 for _ in itertools.takewhile(bool, alone))
        processes = _most(owners, shape, axes)
        return World(self.platform, sizes, processes, partly, self.kind, count, inner)


def _most(owners: np.ndarray, shape: dict[str, int], axes: Iterable[str]) -> int:
    """Count the most owners among devices that differ only along `axes`."""
    along = [k for k, axis in enumerate(shape) if axis in set(axes)]
    grid = np.moveaxis(owners.reshape(tuple(shape.values())), along, range(-len(along), 0))
    rows = grid.reshape(-1, math.prod(grid.shape[grid.ndim - len(along) :]))
    return max(len(set(row)) for row in rows.tolist())


def _hosts(devices: Iterable[jax.Device]) -> dict[int, int]:
    """Find the host (TPU: slice) of each process, from JAX or, for CPUs, from the job."""
    of_processes = hosts_of_job()
    return {d.process_index: _host(d, of_processes) for d in devices}


def _host(device: jax.Device, of_processes: tuple[int, ...]) -> int:
    if device.platform == "cpu":
        return of_processes[device.process_index] if len(of_processes) > 1 else 0
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def platform_and_kind(platform: str, device_kind: str) -> tuple[str, str]:
    """Name "cuda" and "rocm" "gpu"; the device kind of CPUs is ""."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform), device_kind * (platform != "cpu")


set_default_scope(Scope(world=ambient_world))
