"""Trees with a row for each replica, where each process holds only its replicas' rows."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._collectives.scope import DILOCO_AXIS
from jaxcoll._step.mesh.mesh import local_positions, make_line
from jaxcoll._step.mesh.placement import is_in_place, place, view


class ReplicaRows:
    """Two views of trees with a row for each replica: of this process, and of all processes.

    Guarantee: the two views share memory, and nothing is sent. Each device of the mesh is a
    replica; replicas are numbered in the order of `axes`, outer first.

    Raises:
      ValueError: the mesh has other axes, or no device of this process.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        others = {a: n for a, n in mesh.shape.items() if a not in axes and n > 1}
        if others:
            raise ValueError(
                f"`diloco`: each device is a replica, but the mesh has the axes {others} beside "
                f"{axes}. Name all of them in `axis_name`, or pass a mesh without them."
            )
        order = [mesh.axis_names.index(a) for a in axes]
        rest = [i for i in range(len(mesh.axis_names)) if i not in order]
        all_devices = list(mesh.devices.transpose(*order, *rest).flat)
        self.replicas = local_positions(all_devices)  # replica numbers
        if not self.replicas:
            here = f"this process, number {jax.process_index()}"
            raise ValueError(
                f"`diloco`: no device of the mesh belongs to {here}, which cannot train."
            )
        self.devices = tuple(all_devices[i] for i in self.replicas)  # in the same order
        self.mesh = make_line(self.devices, DILOCO_AXIS)
        self.rows = NamedSharding(self.mesh, PartitionSpec(DILOCO_AXIS))  # each row on its device
        self.copies = NamedSharding(self.mesh, PartitionSpec())  # a copy on each device
        self._all_rows = NamedSharding(mesh, PartitionSpec(axes))
        self._all_copies = NamedSharding(mesh, PartitionSpec())
        self._count = len(all_devices)

    def place_rows(self, tree: Any) -> Any:
        """Place rows of this process, or this process's rows of global arrays, on its devices."""
        if is_in_place(tree, self.rows):
            return tree
        return place(jax.tree.map(self._local_rows, tree), self.rows)

    def place_copies(self, tree: Any) -> Any:
        """Place values that are the same on all replicas on each device of this process."""
        return place(jax.tree.map(self._local_copies, tree), self.copies)

    def all_rows(self, tree: Any) -> Any:
        """Make global arrays of all replicas' rows out of placed rows."""
        return jax.tree.map(lambda x: view(x, self._all_rows, (self._count, *x.shape[1:])), tree)

    def all_copies(self, tree: Any) -> Any:
        """Make global arrays that are replicated on all devices out of placed copies."""
        return jax.tree.map(lambda x: view(x, self._all_copies), tree)

    def _local_rows(self, x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if not x.sharding.is_equivalent_to(self._all_rows, x.ndim):
            raise ValueError(_OTHER_SHARDING.format(x, "split by rows over the mesh"))
        rows = x.shape[0] * len(self.devices) // self._count
        return view(x, self.rows, (rows, *x.shape[1:]))

    def _local_copies(self, x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if not x.is_fully_replicated or not x.sharding.device_set.issuperset(self.devices):
            raise ValueError(_OTHER_SHARDING.format(x, "the same on every device of the mesh"))
        return view(x, self.copies)


_OTHER_SHARDING = (
    "`diloco` expects arrays of this process only, or arrays of several processes that are {1}; "
    "got {0.dtype}{0.shape} with the sharding {0.sharding}."
)
