"""Compare the times of collectives on several ranks: transfer, waiting, and late ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxcoll._hlo.collective import Groups
from jaxcoll._report.rows import Row
from jaxcoll._show.units import milliseconds, percent, pluralize

LEAST_LEAD, LEAST_SHARE, LEAST_RUNS = 1e-3, 0.05, 5
"""A rank is late if, in three of four runs, it arrives at least this many seconds and this share
of a step after the others' median. It takes at least this many runs to say so."""
MOST_APART = 60 * 10**9
"""The most nanoseconds that two hosts' clocks may differ; profiles further apart do not match."""


@dataclasses.dataclass(frozen=True)
class Last:
    """The rank that arrives last at a collective most often, and how late it is then."""

    rank: int
    share: float  # of the runs in which it is last
    seconds: float  # the median, over these runs, of how much longer the median other rank took
    seconds_90: float  # the 90th percentile of the same


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of a collective in one run, summed over loop iterations; medians, in seconds.

    The permutes of a pack are measured together: who waits in an early one is late at the next.
    """

    rows: tuple[int, ...]  # positions in `Report.rows` of the collectives measured together
    transfer: float  # the shortest time over the ranks; an upper bound for permutes
    waiting: tuple[float, ...]  # how much longer each rank took than one that it waits for
    last: Last | None  # None if there is only one rank
    algbw: float  # bytes per second, as nccl-tests defines them
    busbw: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measured times of a program: medians over runs that all profiles have, in seconds.

    Attributes:
      ranks: the ranks that were measured; all devices of a process are one rank.
      runs: the number of runs that were compared.
      step_seconds: from the start of one run to the start of the next, under the profiler; None
        if the program ran less than three times.
      unprofiled_step_seconds: the same without the profiler; None if not known.
      exposed_seconds: communication of a run while the device computes nothing; mean over ranks.
      times: the times of each of `Report.rows`; None for a row that did not run.
      turns: how often one run executed each of `Report.rows` in loops without a known trip count;
        None for the other rows, and if runs differ.
      late: the ranks that arrived late, each with the position of the row where it was latest.
      lanes: for each rank the (activity, start, end) of its first device in a typical run, with
        clocks aligned by the ends of collectives; () if no run was recorded in enough detail.
    """

    ranks: tuple[int, ...]
    runs: int
    step_seconds: float | None
    unprofiled_step_seconds: float | None
    exposed_seconds: float
    times: tuple[Times | None, ...]
    turns: tuple[int | None, ...]
    late: tuple[tuple[Last, int], ...]
    lanes: tuple[tuple[tuple[str, float, float], ...], ...] = dataclasses.field(repr=False)

    def summary(self) -> str:
        """Say in a sentence how long a step takes, and how much of it is exposed."""
        step, exposed = self.step_seconds, milliseconds(self.exposed_seconds)
        headline = (
            f"measured in {pluralize(self.runs, 'run')} on {pluralize(len(self.ranks), 'rank')}"
        )
        if step is None:
            return (
                f"{headline}, too few to tell the time of a step: {exposed} of exposed "
                "communication in each"
            )
        if len(self.ranks) > 1 and self.runs < LEAST_RUNS:
            headline += ", too few to name a late rank"
        own, under = self.unprofiled_step_seconds, f"{milliseconds(step)} under the profiler"
        takes = (
            f"your step takes {milliseconds(own)}, and {under}" if own else f"a step takes {under}"
        )
        share = percent(self.exposed_seconds, step)
        return f"{headline}: {takes}, {exposed} of it exposed communication ({share})"

    def sentences(self, rows: Sequence[Row]) -> list[str]:
        return [
            f"rank {last.rank} arrives late: last at {rows[k].compiled.kind} #{k} in "
            f"{percent(last.share, 1)} of {self.runs} runs, by {milliseconds(last.seconds)} "
            f"(90th percentile {milliseconds(last.seconds_90)}) in a step of "
            f"{milliseconds(self.step_seconds or 0.0)}; the other ranks wait for it."
            for last, k in self.late
        ]


def fold_rows(rows: Sequence[Row]) -> list[list[int]]:
    """Group the positions of rows that are measured together: the permutes of a pack.

    Permutes whose pack is not named are grouped by their line of Python.
    """
    folds: dict[tuple[str, ...], list[int]] = {}
    for k, row in enumerate(rows):
        c = row.compiled
        pack = ("permutes", *(row.packs or (c.source or c.computation,)))
        folds.setdefault(pack if c.kind == "collective-permute" else (c.name,), []).append(k)
    return list(folds.values())


def compare(rows: Sequence[Row], ranks: Mapping[int, dict[str, Any]]) -> Measured | None:
    """Compare the times that `time_runs` returned for each rank; None without a common run."""
    names = sorted(ranks)
    by_rank = [ranks[name] for name in names]
    runs = _common_runs(by_rank)
    if not runs:
        return None
    steps = [r["step"] for r in by_rank if r["step"]]
    step = median(steps) / 1e9 if steps else None
    executed = _count_turns(rows, by_rank[0], [run[0] for run in runs])
    times: list[Times | None] = [None] * len(rows)
    late: dict[int, tuple[Last, int]] = {}
    folds = fold_rows(rows)
    shares = []  # for each fold, the share of its time that each rank waited, by [run, rank]
    for n, positions in enumerate(folds):
        # For each run and rank, the durations of its loop iterations.
        turns = [[r["times"][k][n] for r, k in zip(by_rank, run, strict=True)] for run in runs]
        is_whole = [len(set(map(len, run))) == 1 and len(run[0]) > 0 for run in turns]
        total = np.array([[*map(sum, run)] for run in turns], float)
        least = np.zeros_like(total)  # the shortest time of the ranks that a rank meets
        meetings = _find_meetings([rows[k].compiled.groups for k in positions], names, by_rank)
        for meeting in meetings:
            met = ([run[i] for i in meeting] for run in turns)
            # A run in which a rank lacks iterations may be drawn, but its times do not count.
            shortest = [sum(map(min, zip(*durations, strict=False))) for durations in met]
            least[:, meeting] = np.array(shortest, float)[:, None]
        waiting = total - least
        shares.append(np.divide(waiting, total, where=total > 0, out=np.zeros_like(total)))
        if not any(is_whole):
            continue
        total, waiting = total[is_whole] / 1e9, waiting[is_whole] / 1e9
        # Groups that do not meet transfer beside each other: the slowest of them counts.
        transfer = float(np.median(least[is_whole], 0).max()) / 1e9
        found = [
            _find_last([names[i] for i in meeting], total[:, meeting], step or 0.0)
            for meeting in meetings
        ]
        last = max((one for one, _ in found if one), key=lambda one: one.seconds, default=None)
        late_here = [one for _, some in found for one in some]
        size = sent = 0.0
        for k in positions:
            c, often = rows[k].compiled, median(executed[k])
            # As nccl-tests counts bytes: for an all-gather, those of all devices.
            size += often * c.nbytes * (c.group_size if c.kind == "all-gather" else 1)
            sent += often * c.wire_bytes
        measured = Times(
            tuple(positions), transfer, tuple(np.median(waiting, 0).tolist()), last,
            *(nbytes / transfer if transfer else 0.0 for nbytes in (size, sent)),
        )  # fmt: skip
        for k in positions:
            times[k] = measured
        for one in late_here:
            if one.rank not in late or late[one.rank][0].seconds < one.seconds:
                late[one.rank] = one, positions[0]
    exposed = [median(r["exposed"][run[i]] for run in runs) for i, r in enumerate(by_rank)]
    unprofiled = [r["unprofiled"] for r in by_rank if r.get("unprofiled")]
    return Measured(
        tuple(names), len(runs), step, median(unprofiled) / 1e9 if unprofiled else None,
        sum(exposed) / len(exposed) / 1e9, tuple(times),
        tuple(
            of_row[0] if row.compiled.trips is None and len({*of_row}) == 1 else None
            for row, of_row in zip(rows, executed, strict=True)
        ),
        tuple(sorted(late.values(), key=lambda pair: -pair[0].seconds)),
        _lanes(by_rank, runs, shares),
    )  # fmt: skip


def add_turns(rows: Sequence[Row], measured: Measured | None) -> tuple[Row, ...]:
    """Give the rows the trip counts that only the measured runs know."""
    turns = measured.turns if measured else [None] * len(rows)
    return tuple(
        row
        if n is None
        else dataclasses.replace(row, compiled=dataclasses.replace(row.compiled, trips=n))
        for row, n in zip(rows, turns, strict=True)
    )


def _count_turns(
    rows: Sequence[Row], rank: Mapping[str, Any], runs: Sequence[int]
) -> list[list[int]]:
    """Count how often these runs executed each row; only the profile knows it in some loops."""
    recorded = iter(zip(*(rank["turns"][run] for run in runs), strict=True))
    return [
        [c.trips] * len(runs) if c.trips is not None else [*next(recorded)]
        for c in (row.compiled for row in rows)
    ]


def _find_meetings(
    groups: Iterable[Groups], names: Sequence[int], by_rank: Sequence[Mapping[str, Any]]
) -> list[list[int]]:
    """Group the positions of ranks that wait for one another, in groups of devices or along these.

    JAX numbers devices process by process. If the profiles do not fit that, all ranks meet.
    """
    each = by_rank[0]["devices"]
    meets = {name: {name} for name in names}  # shared by all ranks that meet
    seen: set[int] = set()
    for group in itertools.chain.from_iterable(groups):
        ranks = {device // each for device in group}
        seen |= ranks
        joined = ranks.union(*(meets[rank] for rank in ranks & meets.keys()))
        meets |= dict.fromkeys(joined, joined)
    if not {*names} <= seen or any(r["devices"] != each for r in by_rank):
        return [[*range(len(names))]]
    meetings: dict[int, list[int]] = {}
    for i, name in enumerate(names):
        meetings.setdefault(min(meets[name]), []).append(i)
    return list(meetings.values())


def _find_last(names: Sequence[int], total: Any, step: float) -> tuple[Last | None, list[Last]]:
    """Find the rank that is last most often, and all late ranks, from seconds[run, rank]."""
    if len(names) == 1:
        return None, []
    others = [np.median(np.delete(total, i, 1), 1) for i in range(len(names))]
    leads = np.array(others).T - total
    # The last rank to arrive takes the shortest time: it waits for nobody.
    is_last = total.argmin(1)[:, None] == np.arange(len(names))

    def describe(i: int) -> Last:
        # A rank that is never last is judged by all runs.
        lead = leads[is_last[:, i], i] if is_last[:, i].any() else leads[:, i]
        share = float(is_last[:, i].mean())
        return Last(names[i], share, *map(float, np.percentile(lead, (50, 90))))

    least = max(LEAST_LEAD, LEAST_SHARE * step) if len(total) >= LEAST_RUNS else np.inf
    named = [describe(i) for i in range(len(names)) if np.percentile(leads[:, i], 25) >= least]
    return describe(int(is_last.mean(0).argmax())), named


def _common_runs(by_rank: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Find the position on each rank of each run that all ranks recorded.

    Runs are matched by number, or by their order in time. Numbers differ if only some ranks loaded
    the program from the persistent cache; those below 0 count from the end of a rank's profile.
    """
    first, *others = by_rank
    places: list[dict[int, int]] = [{k: k for k in range(len(first["runs"]))}]
    for other in others:
        position = {run: k for k, run in enumerate(other["runs"]) if run >= 0}
        same = {k: position[run] for k, run in enumerate(first["runs"]) if run in position}
        places.append(same or _match_by_time(first["ends"], other["ends"]))
    common = [k for k in places[0] if all(k in place for place in places)]
    return [[place[k] for place in places] for k in common]


def _match_by_time(first: Sequence[int], other: Sequence[int]) -> dict[int, int]:
    """Match the runs of two ranks by time: their intervals give how far their clocks are apart.

    A collective ends at the same time on all ranks, and the clocks of hosts differ by a constant.
    """
    a, b = np.array(first), np.array(other)
    least = max(1, min(len(a), len(b)) // 2)
    apart: list[tuple[float, float]] = []
    for shift in range(least - len(b), len(a) - least + 1):  # matches b[k] with a[k + shift]
        start, end = max(0, shift), min(len(a), len(b) + shift)
        ahead = b[start - shift : end - shift] - a[start:end]
        middle = np.median(ahead)
        if abs(middle) < MOST_APART:
            apart.append((float(np.mean(abs(ahead - middle)) + abs(middle) / 1000), middle))
    if not apart:
        return {}
    _, middle = min(apart)
    # A rank may lack a run in the middle: match by time, not by position.
    within = float(np.median(np.diff(a))) / 2 if len(a) > 1 else np.inf
    at = find_nearest(a, b - int(middle), within).tolist()
    return {k: at.index(k) for k in range(len(a)) if k in at}


def find_nearest(sorted_times: np.ndarray, times: np.ndarray, within: float) -> np.ndarray:
    """Find the nearest of some sorted times to each time, by position; -1 if none is near."""
    after = np.searchsorted(sorted_times, times).clip(max=len(sorted_times) - 1)
    before = np.maximum(after - 1, 0)
    is_before = abs(times - sorted_times[before]) < abs(times - sorted_times[after])
    at = np.where(is_before, before, after)
    return np.where(abs(sorted_times[at] - times) <= within, at, -1)


def _lanes(
    by_rank: Sequence[dict[str, Any]], runs: Sequence[Sequence[int]], shares: Sequence[Any]
) -> tuple[tuple[tuple[str, float, float], ...], ...]:
    """Draw the lanes of the run that took the median time, on the clock of the first rank."""
    first = by_rank[0]
    recorded = [
        (first["ends"][run[0]] - first["starts"][run[0]], at)
        for at, run in enumerate(runs)
        if all(r["lanes"][place] for r, place in zip(by_rank, run, strict=True))
    ]
    if not recorded:
        return ()
    _, at = sorted(recorded)[len(recorded) // 2]
    # A run ends at about the same time on all ranks, and the clocks of hosts differ by a constant:
    # the median leaves out the runs in which one rank was late.
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
                # An event lasts from a rank's arrival to the end, which is that of all: first it
                # waits.
                joined = start + float(shares[fold][at, i]) * (end - start)
                spans += [("waiting", start, joined), ("transfer", joined, end)]
        lanes.append(tuple(spans))
    return tuple(lanes)
