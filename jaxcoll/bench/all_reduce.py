"""Measure all contestants on one workload, in turn, round by round."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxcoll._cluster.machine import machine
from jaxcoll.bench.counters import busy_seconds, idle_rate
from jaxcoll.bench.naming import BASELINE
from jaxcoll.bench.rank_pool import Entry, Team
from jaxcoll.bench.timing import Result, estimate, interleaved, ratio
from jaxcoll.bench.workloads import Workload

COMPILES = 3
WARM = 2
TRIALS = 3
SHORTEST = 0.01
"""Seconds that a turn should take at least: faster calls are made several times in it."""
MOST_CALLS = 100


@dataclasses.dataclass(frozen=True)
class Round:
    """One contestant in one round; each figure is that of one call."""

    seconds: float
    cpu_seconds: float
    socket_bytes: float


@dataclasses.dataclass
class Contestant:
    """One way to reduce the workload, and its figures so far."""

    name: str  # as its team spells it
    team: Team  # that carries it out
    # Of the slowest rank, each time that it was built
    compile_seconds: list[float] = dataclasses.field(default_factory=list)
    # Of `Rank.describe`; the error is the largest of all ranks
    description: dict[str, Any] = dataclasses.field(default_factory=dict)
    warm: float = 0.0  # seconds of the last call that did not count
    calls: int = 1  # in one round
    rounds: list[Round] = dataclasses.field(default_factory=list)  # what was measured

    def compile(self) -> float | None:
        """Build it anew; seconds on the slowest rank, or None where nothing is built."""
        seconds = self.team.do("compile", name=self.name)
        return None if None in seconds else max(seconds)

    def warm_up(self) -> None:
        """Carry it out once, uncounted, and settle how many calls make a turn."""
        self.calls = 1
        self.warm = self.turn().seconds
        self.calls = min(MOST_CALLS, math.ceil(SHORTEST / self.warm))

    def turn(self) -> Round:
        """Carry it out, `calls` times."""
        before = self.team.sent_bytes() or 0
        ranks = self.team.do("time", name=self.name, calls=self.calls)
        sent = (self.team.sent_bytes() or 0) - before - self.team.barrier_bytes
        return Round(
            seconds=max(x["seconds"] for x in ranks) / self.calls,
            cpu_seconds=sum(x["cpu_seconds"] for x in ranks) / self.calls,
            socket_bytes=sent / self.calls,
        )

    def of(self, field: str) -> list[float]:
        """One figure, round by round."""
        return [getattr(measured, field) for measured in self.rounds]


def steps(workload: Workload, teams: Sequence[Team], rounds: int) -> int:
    """How often `measure` reports progress on one workload."""
    entries = [entry for team in teams for entry in _taking_part(workload, team)]
    trials = sum(len(entry) for entry in entries if len(entry) > 1)
    return len(entries) * (COMPILES + 1 + WARM + rounds) + TRIALS * trials + 1


def measure(
    workload: Workload,
    teams: Sequence[Team],
    *,
    reduce_op: str,
    rounds: int,
    progress: Callable[[str], None],
) -> list[Result]:
    """Measure all entries of all teams on one workload; only one team works at a time.

    The first team has the baseline. After `WARM` rounds `rounds` are timed; `progress` gets words
    for what is being done, `steps` times.
    """
    # Plain values: another library's interpreter may have no JAX.
    leaves = [{"shape": x.shape, "dtype": x.dtype.name} for x in workload.leaves]
    progress("values")
    for team in teams:
        team.do("prepare", leaves=leaves, reduce_op=reduce_op)
    chosen = {c.name: c for team in teams for c in _shortlist(workload, team, progress)}
    for compiled in interleaved(_turns(chosen, Contestant.compile, "compile", progress), COMPILES):
        for name, seconds in compiled.items():
            if seconds is not None:
                chosen[name].compile_seconds.append(seconds)
    for c in chosen.values():
        progress(f"check {c.name}")
        descriptions = c.team.do("describe", name=c.name)
        c.description = {**descriptions[0], "error": max(x["error"] for x in descriptions)}
    for _ in range(WARM):
        for warm_up in _turns(chosen, Contestant.warm_up, "warm up", progress).values():
            warm_up()
    for team in teams:
        team.barrier_bytes = _barrier_bytes(team)
    # Before the rounds, so that what others send meanwhile can be told from what is measured.
    idle = idle_rate(teams[0].sent_bytes)
    start = _spent(teams)
    for measured in interleaved(_turns(chosen, Contestant.turn, "measure", progress), rounds):
        for name, values in measured.items():
            chosen[name].rounds.append(values)
    others = _other_cores(start, _spent(teams)) if teams[0].on_this_host else None
    return [
        _result(workload, reduce_op, c, chosen[BASELINE], idle, others) for c in chosen.values()
    ]


T = TypeVar("T")


def _turns(
    chosen: Mapping[str, Contestant],
    turn: Callable[[Contestant], T],
    doing: str,
    progress: Callable[[str], None],
) -> dict[str, Callable[[], T]]:
    """What each contestant does in its turn, by name."""

    def take(c: Contestant) -> T:
        progress(f"{doing} {c.name}")
        return turn(c)

    return {c.name: lambda c=c: take(c) for c in chosen.values()}


def _result(
    workload: Workload,
    reduce_op: str,
    c: Contestant,
    base: Contestant,
    idle: float,
    other_cores: float | None,
) -> Result:
    """All rounds of a contestant together."""
    world, built = c.team.world, c.compile_seconds
    sent, disturbed = _sockets(c, idle)
    return Result(
        workload=workload.name,
        is_size=workload.is_size,
        algorithm=c.name,
        library=world["library"],
        platform=world["platform"],
        machine=machine() if world["platform"] == "cpu" else str(world["device"]),
        devices=world["devices"],
        processes=world["processes"],
        network=c.team.network,
        reduce_op=reduce_op,
        dtypes=tuple(dict.fromkeys(x.dtype.name for x in workload.leaves)),
        leaves=len(workload.leaves),
        bytes=workload.nbytes,
        rounds=len(c.rounds),
        calls=c.calls,
        seconds=estimate(c.of("seconds")),
        ratio=ratio(c.of("seconds"), base.of("seconds")),
        cpu_seconds=float(np.median(c.of("cpu_seconds"))),
        cpu_ratio=ratio(c.of("cpu_seconds"), base.of("cpu_seconds")),
        wire_bytes=c.description.get("wire_bytes"),
        socket_bytes=sent,
        socket_bytes_disturbed=disturbed,
        operands=c.description.get("operands"),
        temporary_bytes=c.description.get("temporary_bytes"),
        compile_seconds=float(np.median(built)) if built else None,
        compile_ratio=ratio(built, base.compile_seconds) if built else None,
        error=c.description["error"],
        other_cores=other_cores,
    )


def _taking_part(workload: Workload, team: Team) -> list[Entry]:
    """A team's entries. Those of several names differ in how they pack: nothing for one array."""
    return [entry for entry in team.entries if len(entry) == 1 or len(workload.leaves) > 1]


def _shortlist(workload: Workload, team: Team, progress: Callable[[str], None]) -> list[Contestant]:
    """The contestants: of several in one entry, the one with the best median of a few trials."""
    found = []
    # A short trial: to measure all of them in every round would take the time of the others.
    for entry in _taking_part(workload, team):
        those = {name: Contestant(name, team) for name in entry}
        if len(those) > 1:
            trials = list(interleaved(_turns(those, Contestant.turn, "try", progress), TRIALS))
            best = min(entry, key=lambda n: np.median([t[n].seconds for t in trials]))
            those = {best: those[best]}
        found += those.values()
    return found


def _barrier_bytes(team: Team) -> float:
    """Bytes that a barrier sends."""

    def sent() -> float:
        before = team.sent_bytes() or 0
        team.do("time", name="", calls=0)
        return (team.sent_bytes() or 0) - before

    return float(np.median([sent() for _ in range(3)]))


def _sockets(c: Contestant, idle: float) -> tuple[float | None, bool | None]:
    """Bytes per device by the kernel, and whether other traffic may have been counted with them."""
    if c.team.sent_bytes() is None:
        return None, None
    # Other traffic only ever adds, so the least is nearest to the truth.
    least, usual = max(0.0, min(c.of("socket_bytes"))), np.median(c.of("socket_bytes"))
    others = idle * min(c.of("seconds"))
    disturbed = max(others, usual - least) > max(0.01 * least, 1024)
    return least / c.team.world["devices"], bool(disturbed)


def _spent(teams: Sequence[Team]) -> tuple[float, float, float]:
    """Wall clock, busy seconds of all cores, and those of all ranks and of this process."""
    # A rank that is not launched is this process.
    ranks = sum(sum(team.do("cpu_seconds")) for team in teams if team.launched)
    return time.perf_counter(), busy_seconds() or 0.0, ranks + time.process_time()


def _other_cores(
    start: tuple[float, float, float], end: tuple[float, float, float]
) -> float | None:
    """Cores that other programs kept busy between two readings of `_spent`."""
    wall, busy, ours = (b - a for a, b in zip(start, end, strict=True))
    return max(0.0, busy - ours) / wall if busy_seconds() is not None else None
