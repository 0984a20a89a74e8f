"""Compare what collectives took on several ranks: transfer, waiting, and who came late."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.rows import Row
from jaxcoll._show.units import counted, milliseconds, percent

LEAST_LEAD, LEAST_SHARE, LEAST_RUNS = 1e-3, 0.05, 5
"""A rank is late if the lower quartile of its lead is so many seconds and this share of a step, in
so many runs or more."""
MOST_APART = 60 * 10**9
"""Nanoseconds between the clocks of two hosts; profiles further apart are of different runs."""


@dataclasses.dataclass(frozen=True)
class Last:
    """The rank that comes last to a collective most often, and by how much when it does."""

    rank: int
    share: float  # of the runs
    seconds: float  # the median of what the others took longer, as their median
    seconds_90: float  # its 90th percentile


@dataclasses.dataclass(frozen=True)
class Times:
    """What a collective took in one run, all turns of its loop together; medians, in seconds.

    Permutes of one pack are one: ranks that wait in an early one come late to the next.
    """

    rows: tuple[int, ...]  # positions in `Report.rows` of what was measured as one
    transfer: float  # the shortest time over the ranks; of permutes an upper bound
    waiting: tuple[float, ...]  # what each rank took longer
    last: Last | None  # None where there is one rank
    algbw: float  # bytes a second, as nccl-tests defines them
    busbw: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a program took: medians over runs that every rank's profile has whole, in seconds.

    Attributes:
      ranks: the ranks that were measured; the devices of a process are one.
      runs: the runs that were compared.
      step_seconds: from the start of one run to that of the next, while the profile was open.
      unprofiled_step_seconds: likewise, before it was opened; None if not known.
      exposed_seconds: communication in one run during which a device computed nothing, the mean of
        the ranks.
      times: for each of `Report.rows`, or None for one that did not run.
      late: the ranks that came late, and the position of the row before which they did most.
      lanes: for each rank what its first device did in a typical run, as (what, start, end), with
        clocks aligned by the ends of collectives; () if no run is known so well.
    """

    ranks: tuple[int, ...]
    runs: int
    step_seconds: float
    unprofiled_step_seconds: float | None
    exposed_seconds: float
    times: tuple[Times | None, ...]
    late: tuple[tuple[Last, int], ...]
    lanes: tuple[tuple[tuple[str, float, float], ...], ...] = dataclasses.field(repr=False)

    def summary(self) -> str:
        """Say how long a step takes, and how much of it is exposed."""
        before = self.unprofiled_step_seconds
        outside = f" ({milliseconds(before)} without the profile)" if before else ""
        step, exposed = self.step_seconds, self.exposed_seconds
        too_few = len(self.ranks) > 1 and self.runs < LEAST_RUNS
        return (
            f"measured in {counted(self.runs, 'run')} on {counted(len(self.ranks), 'rank')}"
            f"{', too few to name one that comes late' * too_few}: a step takes "
            f"{milliseconds(step)}{outside}, {milliseconds(exposed)} of it exposed "
            f"communication ({percent(exposed, step)})"
        )

    def sentences(self, rows: Sequence[Row]) -> list[str]:
        """Name the late ranks, in words."""
        return [
            f"rank {last.rank} comes late: last to {rows[k].compiled.kind} #{k} in "
            f"{last.share:.0%} of {self.runs} runs, by {milliseconds(last.seconds)} "
            f"(90th percentile {milliseconds(last.seconds_90)}) of a step's "
            f"{milliseconds(self.step_seconds)}; the others wait for it."
            for last, k in self.late
        ]


def folds_of(rows: Sequence[Row]) -> list[list[int]]:
    """Return positions of rows that are compared between ranks as one: the permutes of a pack.

    Where no name says so, those of one line are taken for a pack.
    """
    folds: dict[tuple[str, ...], list[int]] = {}
    for k, row in enumerate(rows):
        c = row.compiled
        pack = ("permutes", *(row.packs or (c.source or c.computation,)))
        folds.setdefault(pack if c.kind == "collective-permute" else (c.name,), []).append(k)
    return list(folds.values())


def compare(rows: Sequence[Row], ranks: Mapping[int, dict[str, Any]]) -> Measured | None:
    """Compare what `rank_times.times_of` returned on each rank; None without a common run."""
    names = sorted(ranks)
    by_rank = [ranks[name] for name in names]
    runs = _common_runs(by_rank)
    if not runs:
        return None
    step = median(r["step"] for r in by_rank) / 1e9
    times: list[Times | None] = [None] * len(rows)
    late: dict[int, tuple[Last, int]] = {}
    folds = folds_of(rows)
    shares = []  # of each fold the part of each rank's time, in each run, that it waited
    for n, positions in enumerate(folds):
        # For each run and rank, the durations of one turn after another.
        turns = [[r["times"][k][n] for r, k in zip(by_rank, run, strict=True)] for run in runs]
        alike = [len({len(own) for own in run}) == 1 and len(run[0]) > 0 for run in turns]
        least = [sum(map(min, zip(*run, strict=False))) for run in turns]
        total = np.array([[sum(own) for own in run] for run in turns], float)
        waiting = total - np.array(least)[:, None]
        shares.append(np.divide(waiting, total, where=total > 0, out=np.zeros_like(total)))
        if not any(alike):
            continue
        total, waiting = total[alike] / 1e9, waiting[alike] / 1e9
        transfer = float(np.median(np.array(least)[alike])) / 1e9
        last, named = _last(names, total, step)
        size = sum(_size(rows[k].compiled) for k in positions)
        sent = sum(rows[k].wire_bytes for k in positions)
        measured = Times(
            tuple(positions), transfer, tuple(np.median(waiting, 0).tolist()), last,
            *(nbytes / transfer if transfer else 0.0 for nbytes in (size, sent)),
        )  # fmt: skip
        for k in positions:
            times[k] = measured
        for one in named:
            if one.rank not in late or late[one.rank][0].seconds < one.seconds:
                late[one.rank] = one, positions[0]
    exposed = [median(r["exposed"][run[i]] for run in runs) for i, r in enumerate(by_rank)]
    outside = [r["outside"] for r in by_rank if r.get("outside")]
    return Measured(
        tuple(names), len(runs), step, median(outside) / 1e9 if outside else None,
        sum(exposed) / len(exposed) / 1e9, tuple(times),
        tuple(sorted(late.values(), key=lambda pair: -pair[0].seconds)),
        _lanes(by_rank, runs, shares),
    )  # fmt: skip


def _size(c: Collective) -> int:
    """Return the bytes of one run that nccl-tests divides: of all devices for an all-gather."""
    return c.turns * c.nbytes * (c.group_size if c.kind == "all-gather" else 1)


def _last(names: Sequence[int], total: Any, step: float) -> tuple[Last | None, list[Last]]:
    """Return the rank that is last most often, and those that are late, of seconds[run, rank]."""
    if len(names) == 1:
        return None, []
    others = [np.median(np.delete(total, i, 1), 1) for i in range(len(names))]
    leads = np.array(others).T - total
    is_last = total.argmin(1)[:, None] == np.arange(len(names))

    def of(i: int) -> Last:
        # Of one that is never last, all runs.
        lead = leads[is_last[:, i], i] if is_last[:, i].any() else leads[:, i]
        share = float(is_last[:, i].mean())
        return Last(names[i], share, *map(float, np.percentile(lead, (50, 90))))

    least = max(LEAST_LEAD, LEAST_SHARE * step) if len(total) >= LEAST_RUNS else np.inf
    named = [of(i) for i in range(len(names)) if np.percentile(leads[:, i], 25) >= least]
    return of(int(is_last.mean(0).argmax())), named


def _common_runs(by_rank: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return for each run that all ranks have its place on each: by its number, or by order.

    Numbers differ where one rank's program came from the persistent cache and another's did not;
    those below 0 were counted from the end of one rank's profile.
    """
    first, *others = by_rank
    places: list[dict[int, int]] = [{k: k for k in range(len(first["runs"]))}]
    for other in others:
        own = {run: k for k, run in enumerate(other["runs"]) if run >= 0}
        same = {k: own[run] for k, run in enumerate(first["runs"]) if run in own}
        places.append(same or _in_order(first["ends"], other["ends"]))
    common = [k for k in places[0] if all(k in place for place in places)]
    return [[place[k] for place in places] for k in common]


def _in_order(first: Sequence[int], other: Sequence[int]) -> dict[int, int]:
    """Lay runs of two ranks side by side so that their ends agree: by their rhythm, then by clock.

    A collective ends at the same time everywhere, and the clocks of hosts differ by a constant.
    """
    a, b = np.array(first), np.array(other)
    least = max(1, min(len(a), len(b)) // 2)
    fits: list[tuple[float, int]] = []
    for shift in range(least - len(b), len(a) - least + 1):  # b[k] is beside a[k + shift]
        start, end = max(0, shift), min(len(a), len(b) + shift)
        apart = a[start:end] - b[start - shift : end - shift]
        middle = np.median(apart)
        if abs(middle) < MOST_APART:
            fits.append((float(np.mean(abs(apart - middle)) + abs(middle) / 1000), shift))
    if not fits:
        return {}
    _, shift = min(fits)
    return {k: k - shift for k in range(max(0, shift), min(len(a), len(b) + shift))}


def _lanes(
    by_rank: Sequence[dict[str, Any]], runs: Sequence[Sequence[int]], shares: Sequence[Any]
) -> tuple[tuple[tuple[str, float, float], ...], ...]:
    """Lay out the run that took the median time, on the clock of the first rank."""
    first = by_rank[0]
    drawn = [
        (first["ends"][run[0]] - first["starts"][run[0]], at)
        for at, run in enumerate(runs)
        if all(r["lanes"][place] for r, place in zip(by_rank, run, strict=True))
    ]
    if not drawn:
        return ()
    _, at = sorted(drawn)[len(drawn) // 2]
    ahead = [
        median(r["ends"][run[i]] - first["ends"][run[0]] for run in runs)
        for i, r in enumerate(by_rank)
    ]
    begins = [r["starts"][runs[at][i]] - ahead[i] for i, r in enumerate(by_rank)]
    lanes = []
    for i, r in enumerate(by_rank):
        spans: list[tuple[str, float, float]] = []
        for fold, *interval in r["lanes"][runs[at][i]]:
            start, end = ((begins[i] - min(begins) + ns) / 1e9 for ns in interval)
            if fold < 0:
                spans.append(("computing", start, end))
            else:
                joined = start + float(shares[fold][at, i]) * (end - start)
                spans += [("waiting", start, joined), ("transfer", joined, end)]
        lanes.append(tuple(spans))
    return tuple(lanes)
