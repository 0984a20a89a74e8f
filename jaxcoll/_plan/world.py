"""Where a reduction runs, as far as a plan needs to know."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """A frozen description, read once above the traced program and handed down.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      replicas: devices along the reduced axes.
      processes: processes that those devices belong to; 1 when nothing leaves the process.
      partly_mapped: some axis of the mesh is not mapped at this point.
    """

    platform: str = "cpu"
    replicas: int = 1
    processes: int = 1
    partly_mapped: bool = False

    def __str__(self) -> str:
        where = f"{self.processes} processes" if self.processes > 1 else "one process"
        return f"{self.replicas} × {self.platform}, {where}"
