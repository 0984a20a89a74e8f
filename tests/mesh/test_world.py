"""What the host reads of the world for a plan."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxcoll._mesh.world import _host, mesh_world
from jaxcoll._plan.world import World


def test_cpu_devices_are_of_one_host_and_of_no_kind():
    mesh = jax.make_mesh((2, 4), ("hosts", "chips"))
    assert mesh_world(mesh, {"hosts": 2, "chips": 4}) == World("cpu", (2, 4))


@pytest.mark.parametrize(
    ("device", "host"),
    [
        ({"platform": "gpu", "process_index": 5, "slice_index": 2}, 2),
        ({"platform": "gpu", "process_index": 5, "slice_index": None}, 5),
        ({"platform": "tpu", "process_index": 5}, 5),
        ({"platform": "cpu", "process_index": 5, "slice_index": 2}, 0),
    ],
)
def test_a_host_is_a_slice_where_jax_knows_slices_and_else_a_process(device, host):
    assert _host(SimpleNamespace(**device)) == host


def test_a_world_of_accelerators_names_them_and_counts_its_hosts():
    devices = np.array(
        [
            SimpleNamespace(
                platform="cuda", device_kind="NVIDIA H100", process_index=k, slice_index=k // 4
            )
            for k in range(8)
        ]
    )
    mesh = SimpleNamespace(devices=devices.reshape(2, 4), axis_names=("outer", "inner"))
    both = mesh_world(mesh, {"outer": 2, "inner": 4})
    assert (both.platform, both.device_kind, both.processes, both.hosts) == (
        "gpu",
        "NVIDIA H100",
        8,
        2,
    )
    assert mesh_world(mesh, {"inner": 4}).hosts == 1
    assert mesh_world(mesh, {"outer": 2}).hosts == 2
