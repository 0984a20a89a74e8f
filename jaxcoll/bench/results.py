"""The result of one contestant on one workload."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxcoll.bench.timing import Estimate


@dataclasses.dataclass(frozen=True)
class Result:
    """One algorithm, or another library, on one tree or size, in one world.

    docs/performance.md describes the figures. `is_size`: one array of several sizes, not a tree.
    Ratios are over the baseline's, paired by round; None where a clock is too coarse for them.
    What the compiler states (`wire_bytes`, `operands`, `temporary_bytes`, `compile_seconds`) and
    what the kernel counts (`socket_bytes`, `other_cores`) is None where it is unknown.
    `network`: what joins the hosts of the replicas; "": one host, or that is not known; between
    hosts `socket_bytes` are those that leave them, over the number of devices.
    `socket_bytes_disturbed`: other traffic, or the spread over rounds, was more than 1 % of them
    (and than 1 KiB). `error`: largest |x - exact| / sum of magnitudes, over elements and ranks.
    """

    workload: str
    is_size: bool
    algorithm: str
    library: str
    platform: str
    machine: str
    devices: int
    processes: int
    network: str
    reduce_op: str
    dtypes: tuple[str, ...]
    leaves: int
    bytes: int
    rounds: int
    calls: int
    seconds: Estimate
    ratio: Estimate | None
    cpu_seconds: float
    cpu_ratio: Estimate | None
    wire_bytes: int | None
    socket_bytes: float | None
    socket_bytes_disturbed: bool | None
    operands: int | None
    temporary_bytes: int | None
    compile_seconds: float | None
    compile_ratio: Estimate | None
    error: float
    other_cores: float | None

    @property
    def world(self) -> str:
        """The replicas in words: "4 processes", "8 gpu devices of one process"."""
        n, processes = self.devices, self.processes
        on = f" on {self.network}" * bool(self.network)
        if processes == 1:
            return f"{n} {self.platform} device{'s' * (n > 1)} of one process"
        if processes == n:
            return f"{n} processes{on}"
        return f"{processes} processes × {n // processes} {self.platform} devices{on}"

    @property
    def algbw(self) -> float:
        """S / seconds in GB/s."""
        return self.bytes / self.seconds.median / 1e9

    @property
    def busbw(self) -> float:
        """What nccl-tests calls busbw: algbw × 2(n-1)/n, in GB/s."""
        return self.algbw * self.bus_factor

    @property
    def bus_factor(self) -> float:
        """2(n-1)/n: what an all-reduce sends at least, in parts of S."""
        return 2 * (self.devices - 1) / self.devices

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; one JSON line."""
        fields = dataclasses.asdict(self)
        return {**fields, "algbw": self.algbw, "busbw": self.busbw}
