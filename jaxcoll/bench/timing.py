"""Interleaved rounds, medians and bootstrap intervals, and the result of one contestant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median over rounds, with its 95 % bootstrap interval (2,000 resamples)."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interleaved(calls: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Make every call once per round, in turned order every other one; yields results by name."""
    names = list(calls)
    for k in range(rounds):
        # Reversed, so that a drift of the machine within rounds cancels over two of them.
        order = names if k % 2 == 0 else names[::-1]
        yield {name: calls[name]() for name in order}


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median of at least one value, one per round; `seed` is for the resampling."""
    found = np.asarray(values, float)
    # The median of rounds and not their mean: a round that was disturbed is off by any factor.
    picks = np.random.default_rng(seed).integers(0, len(found), (2000, len(found)))
    low, high = np.percentile(np.median(found[picks], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(found)), float(low), float(high))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate | None:
    """Of the quotients of each round; None where the clock was too coarse for a denominator."""
    if not all(denominator):
        return None
    return estimate([a / b for a, b in zip(numerator, denominator, strict=True)])


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
