"""The measurement: every contestant on one workload, in turn, round by round."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxcoll.bench.counters import busy_seconds, idle_loopback_rate, loopback_bytes, machine
from jaxcoll.bench.results import Result
from jaxcoll.bench.spelling import BASELINE
from jaxcoll.bench.teams import Team
from jaxcoll.bench.timing import estimate, interleaved, ratio
from jaxcoll.bench.trees import Workload

COMPILES = 3
WARM = 2
TRIALS = 3
SHORTEST = 0.01
"""Seconds that a round should take at least: faster calls are made several times in it."""
MOST_CALLS = 100


@dataclasses.dataclass(frozen=True)
class Round:
    """What one contestant did in one round; each figure is that of one call."""

    seconds: float
    cpu_seconds: float
    socket_bytes: float


def steps(teams: Sequence[Team], rounds: int) -> int:
    """How often `measure` reports progress on one workload."""
    entries = [entry for team in teams for entry in team.entries]
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
    """Measure all entries of all teams on one workload.

    Only one team works at a time. The time of a round is its slowest rank's.

    Args:
      workload: what is reduced.
      teams: the first one has the baseline among its entries.
      reduce_op: "mean" or "sum".
      rounds: timed rounds, after `WARM` that are not.
      progress: told what is being done, `steps` times.

    Returns:
      One result an entry, the baseline's first.

    Raises:
      ValueError: what an algorithm needs is not there.
      LaunchError: a rank failed.
    """
    leaves = [{"shape": x.shape, "dtype": x.dtype.name} for x in workload.leaves]
    progress("values")
    for team in teams:
        team.do("prepare", leaves=leaves, reduce_op=reduce_op)
    chosen = {name: team for team in teams for name in _shortlist(team, progress)}

    def compiled(name: str) -> float | None:
        progress(f"compile {name}")
        seconds = chosen[name].do("compile", name=name)
        return None if None in seconds else max(seconds)

    compiles = list(interleaved({n: lambda n=n: compiled(n) for n in chosen}, COMPILES))
    known = {}
    for name, team in chosen.items():
        progress(f"check {name}")
        told = team.do("describe", name=name)
        known[name] = {**told[0], "error": max(x["error"] for x in told)}

    calls = dict.fromkeys(chosen, 1)
    for k in range(WARM):
        for name, team in chosen.items():
            progress(f"warm up {name}")
            took = _round(team, name, 1, 0.0).seconds
            if k == WARM - 1:
                calls[name] = min(MOST_CALLS, math.ceil(SHORTEST / took))
    meeting = {id(team): _meeting_bytes(team) for team in teams}
    idle = idle_loopback_rate() if loopback_bytes() is not None else 0.0

    def timed(name: str) -> Round:
        progress(f"measure {name}")
        return _round(chosen[name], name, calls[name], meeting[id(chosen[name])])

    with _Others(teams) as others:
        measured = list(interleaved({n: lambda n=n: timed(n) for n in chosen}, rounds))

    def of(field: str, name: str) -> list[float]:
        return [getattr(r[name], field) for r in measured]

    results = []
    for name, team in chosen.items():
        built = [x[name] for x in compiles]
        base = [x[BASELINE] for x in compiles]
        sockets = _sockets(of("socket_bytes", name), of("seconds", name), idle, team)
        results.append(
            Result(
                workload=workload.name,
                is_size=workload.is_size,
                algorithm=name,
                library=team.world["library"],
                platform=team.world["platform"],
                machine=_machine(team),
                devices=team.world["devices"],
                processes=team.world["processes"],
                reduce_op=reduce_op,
                dtypes=tuple(dict.fromkeys(x.dtype.name for x in workload.leaves)),
                leaves=len(workload.leaves),
                bytes=workload.nbytes,
                rounds=rounds,
                calls=calls[name],
                seconds=estimate(of("seconds", name)),
                ratio=ratio(of("seconds", name), of("seconds", BASELINE)),
                cpu_seconds=float(np.median(of("cpu_seconds", name))),
                cpu_ratio=ratio(of("cpu_seconds", name), of("cpu_seconds", BASELINE)),
                wire_bytes=known[name].get("wire_bytes"),
                socket_bytes=sockets[0],
                socket_bytes_disturbed=sockets[1],
                operands=known[name].get("operands"),
                temporary_bytes=known[name].get("temporary_bytes"),
                compile_seconds=None if None in built else float(np.median(built)),
                compile_ratio=None if None in built else ratio(built, base),
                error=known[name]["error"],
                other_cores=others.cores,
            )
        )
    return results


def _shortlist(team: Team, progress: Callable[[str], None]) -> list[str]:
    """The contestants: of several in one entry, the one with the best median of a few trials."""
    chosen = []
    for entry in team.entries:
        if len(entry) == 1:
            chosen += entry
            continue

        def tried(name: str) -> float:
            progress(f"try {name}")
            return _round(team, name, 1, 0.0).seconds

        times = list(interleaved({n: lambda n=n, tried=tried: tried(n) for n in entry}, TRIALS))
        chosen.append(min(entry, key=lambda n: np.median([t[n] for t in times])))
    return chosen


def _round(team: Team, name: str, calls: int, meeting: float) -> Round:
    """One contestant's turn; `meeting` are the bytes of the barrier that starts it."""
    before = loopback_bytes()
    ranks = team.do("time", name=name, calls=calls)
    after = loopback_bytes()
    return Round(
        seconds=max(x["seconds"] for x in ranks) / calls,
        cpu_seconds=sum(x["cpu_seconds"] for x in ranks) / calls,
        socket_bytes=((after or 0) - (before or 0) - meeting) / calls,
    )


def _meeting_bytes(team: Team) -> float:
    """Bytes that a barrier sends through loopback."""

    def met() -> float:
        before = loopback_bytes() or 0
        team.do("time", name="", calls=0)
        return (loopback_bytes() or 0) - before

    return float(np.median([met() for _ in range(3)]))


def _sockets(
    counted: list[float], seconds: list[float], idle: float, team: Team
) -> tuple[float | None, bool | None]:
    """Bytes a device by the kernel, and whether anything else may have been counted with them."""
    if not team.on_loopback or loopback_bytes() is None:
        return None, None
    low, median, high = np.percentile(counted, [25, 50, 75])
    others = idle * float(np.median(seconds))
    disturbed = others > 0.01 * median or high - low > max(0.01 * median, 1024)
    return max(0.0, float(median)) / team.world["devices"], bool(disturbed)


class _Others:
    """What other programs of this host did between `__enter__` and `__exit__`, in cores."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self._teams = teams
        self.cores: float | None = None

    def __enter__(self) -> _Others:
        self._start = self._now()
        return self

    def __exit__(self, *error: Any) -> None:
        wall, busy, ours = (b - a for a, b in zip(self._start, self._now(), strict=True))
        if busy_seconds() is not None and all(team.on_this_host for team in self._teams):
            self.cores = max(0.0, busy - ours) / wall

    def _now(self) -> tuple[float, float, float]:
        """Wall clock, busy seconds of all cores, and those of all ranks and of this process."""
        # A rank that is not launched is this process.
        ranks = [sum(team.do("cpu_seconds")) for team in self._teams if team.on_loopback]
        return time.perf_counter(), busy_seconds() or 0.0, sum(ranks) + time.process_time()


def _machine(team: Team) -> str:
    """The accelerator, or this machine's processor."""
    return machine() if team.world["platform"] == "cpu" else str(team.world["device"])
