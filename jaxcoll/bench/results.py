"""The result of one contestant on one workload."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxcoll.bench.timing import Estimate


@dataclasses.dataclass(frozen=True)
class Result:
    """One algorithm, or another library, on one tree or size, in one world.

    Attributes:
      workload: name of the tree, or the size.
      is_size: whether it is one array of several sizes, rather than a tree.
      algorithm: as spelled on the command line; or the peer and what it did.
      library: "jax" or the peer, with its version.
      platform: "cpu", "gpu" or "tpu".
      machine: processor or accelerator, and how many cores.
      devices: replicas (n).
      processes: processes.
      reduce_op: "mean" or "sum".
      dtypes: of the leaves.
      leaves: how many.
      bytes: bytes of all leaves on one replica (S).
      rounds: timed rounds.
      calls: calls in each round.
      seconds: wall seconds of one call, the slowest rank's.
      algbw: S / seconds, in GB/s (10^9 bytes), as nccl-tests defines it.
      busbw: algbw × 2(n-1)/n, as there.
      ratio: seconds over the baseline's, paired by round.
      cpu_seconds: user and system time of one call, summed over ranks, all threads.
      cpu_ratio: cpu_seconds over the baseline's, paired by round; None where the clock is too
        coarse.
      wire_bytes: that leave one device in one call, by the compiled program; None for peers.
      socket_bytes: the same by the kernel's counter of the loopback interface, headers
        included, in the round that had least; None where nothing goes through it, and where
        there is no such counter.
      socket_bytes_disturbed: whether other traffic, or the spread over rounds, was more than
        1 % of it (and than 1 KiB), so that other programs' bytes may be among them.
      operands: arrays handed to collectives in one call; None where unknown.
      temporary_bytes: memory beside arguments and results, as the compiler states it.
      compile_seconds: tracing, lowering and compiling, the slowest rank's; None for peers.
      compile_ratio: compile_seconds over the baseline's, paired by round.
      error: largest |x - exact| / sum of magnitudes, exact in float64, over elements and ranks.
      other_cores: cores that other programs kept busy meanwhile; None where unknown.
    """

    workload: str
    is_size: bool
    algorithm: str
    library: str
    platform: str
    machine: str
    devices: int
    processes: int
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
        if processes == 1:
            return f"{n} {self.platform} device{'s' * (n > 1)} of one process"
        if processes == n:
            return f"{n} processes"
        return f"{processes} processes × {n // processes} {self.platform} devices"

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
