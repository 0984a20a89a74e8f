"""What the host reads of the world for a plan."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxcoll._plan.world import World
from jaxcoll._step.mesh import world
from jaxcoll._step.mesh.world import _host, mesh_world


def grid(inner, **kind):
    """A mesh of two slices of so many devices, each of a process of its own."""
    devices = [
        SimpleNamespace(process_index=k, slice_index=k // inner, **kind) for k in range(2 * inner)
    ]
    line = np.array(devices).reshape(2, inner)
    return SimpleNamespace(devices=line, axis_names=("outer", "inner"))


def test_hosts_are_slices_or_processes():
    for platform, more, host in (
        ("gpu", {"slice_index": 2}, 2),
        ("gpu", {"slice_index": None}, 5),
        ("tpu", {}, 5),
        ("cpu", {"slice_index": 2}, 3),
    ):
        device = SimpleNamespace(platform=platform, process_index=5, **more)
        assert _host(device, (0, 0, 0, 3, 3, 3)) == host


def test_accelerators_count_their_hosts():
    mesh = grid(4, platform="cuda", device_kind="NVIDIA H100")
    both = mesh_world(mesh, {"outer": 2, "inner": 4})
    assert (both.platform, both.device_kind) == ("gpu", "NVIDIA H100")
    assert (both.processes, both.hosts) == (8, 2)
    assert mesh_world(mesh, {"inner": 4}).hosts == 1
    assert mesh_world(mesh, {"outer": 2}).hosts == 2
    here = jax.make_mesh((2, 4), ("hosts", "chips"))
    assert mesh_world(here, {"hosts": 2, "chips": 4}) == World("cpu", (2, 4))


def test_inner_axes_stay_within_hosts(monkeypatch):
    both = {"outer": 2, "inner": 2}
    for hosts, axes, met, inner in (
        ((0, 0, 2, 2), both, 2, 1),
        ((0, 0, 0, 0), both, 1, 0),
        ((0, 1, 0, 1), both, 2, 0),
        ((0, 1, 0, 1), {"inner": 2, "outer": 2}, 2, 1),
        ((0, 0, 0, 3), both, 2, 0),
        ((0, 0, 2, 2), {**both, "of a vmap": 3}, 2, 0),
        ((0, 0, 2, 2), {"inner": 2}, 1, 0),
        ((0, 0, 2, 2), {"outer": 2}, 2, 0),
    ):
        monkeypatch.setattr(world, "hosts_of_job", lambda hosts=hosts: hosts)
        found = mesh_world(grid(2, platform="cpu", device_kind="cpu"), axes)
        assert (found.hosts, found.inner) == (met, inner), axes


def test_uneven_mesh_has_a_world():
    worlds, found = world.Worlds("cpu", "", ((0, 0), (1, 1))), []
    mesh = jax.sharding.AbstractMesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def f(x):
        found.append(worlds({"data": 3}))
        return x

    spec = jax.sharding.PartitionSpec("data")
    jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec), np.zeros(3, "f"))
    assert found == [World("cpu", (3,), processes=2, hosts=2)]
