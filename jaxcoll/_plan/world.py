"""The replicas, processes and hosts of a reduction, as a plan describes them."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class World:
    """The replicas, processes and hosts of a reduction, read once outside the traced program."""

    platform: str = "cpu"  # "cpu", "gpu" or "tpu"
    sizes: tuple[int, ...] = (1,)  # replicas along each of the reduced axes, outer first
    processes: int = 1  # processes that those devices belong to; 1 when nothing leaves the process
    partly_mapped: bool = False  # some axis of the mesh is not mapped at this point
    # What JAX calls the devices ("NVIDIA H100 80GB HBM3"); "" where it is not known
    device_kind: str = ""
    hosts: int = 1  # hosts (TPU: slices) that those devices belong to
    # Number of axes, counted from the last, that stay within a host; 0 if there is one host, or
    # if that is not known
    inner: int = 0

    @property
    def replicas(self) -> int:
        """Devices along the reduced axes together."""
        return math.prod(self.sizes)

    @property
    def over_gloo(self) -> bool:
        """True where Gloo carries what leaves a device: for CPU devices of several processes."""
        return self.platform == "cpu" and self.processes > 1

    def __str__(self) -> str:
        where = f"{self.processes} processes" if self.processes > 1 else "one process"
        where += f" on {self.hosts} hosts" * (self.over_gloo and self.hosts > 1)
        return f"{' × '.join(map(str, self.sizes))} × {self.platform}, {where}"
