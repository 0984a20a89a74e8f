"""Reduce one process's profile to the times of collectives in each run, for other ranks to read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from jaxcoll._report.measured import find_nearest, fold_rows
from jaxcoll._report.profile.backends import Backend, Executions
from jaxcoll._report.profile.event_names import DONE, START, EventNames
from jaxcoll._report.report import Report
from jaxcoll._report.rows import Row

_CONTAINER = re.compile(r"(?:while|conditional|call)(?:[.\-_]\d+)*$")
"""Instructions that contain others; these have their own events."""
_DRAWN = 9
"""The runs in the middle whose lanes are kept: other ranks may not have the first and the last."""
_NO_RUN = -(1 << 62)
_PIECES = 400  # resolution of a lane in the picture: shorter gaps between computations are closed


class _Events(NamedTuple):
    """Executions of a program, as columns, sorted by start; first each event's place."""

    run: np.ndarray
    device: np.ndarray
    row: np.ndarray  # position of the collective in `Report.rows`; -1 for other instructions
    role: np.ndarray  # WHOLE, START or DONE
    computes: np.ndarray  # neither a collective, nor an instruction that contains others
    start: np.ndarray
    end: np.ndarray

    def select(self, chosen: np.ndarray | slice) -> _Events:
        return _Events(*(column[chosen] for column in self))


def time_runs(
    report: Report, names: EventNames, executions: Executions, backend: Backend, most: int
) -> dict[str, Any] | None:
    """Find the times of the last `most` complete runs, in nanoseconds; None if there are none.

    For each run: its number, its start, the end of its last collective, its exposed communication,
    and the durations of each fold on the device that waited least. For some in the middle: the
    lane of the first device; and how often it executed each collective in a loop without a known
    trip count. "step" is the median time from one start to the next (of one or two runs, their
    length, if the profile has it), and "devices" the number of devices that were recorded. Runs
    without a number count from -1, the last.
    """
    regular = find_regular(report.rows)
    events = _events(names, executions, backend, regular)
    numbers, events = _complete_runs(events, regular, backend, most)
    if not numbers:
        return None
    folds = fold_rows(report.rows)
    fold_of = np.zeros(len(report.rows) + 1, int) - 1  # the last is that of other instructions
    for n, rows in enumerate(folds):
        fold_of[rows] = n
    permutes = {
        n for n, ks in enumerate(folds) if report.rows[ks[0]].compiled.kind == "collective-permute"
    }
    transfers = _transfers(events, backend)
    fold = fold_of[transfers.row]
    edges = np.searchsorted(events.run, np.arange(len(numbers) + 1)).tolist()
    by_run = [events.select(slice(*edge)) for edge in itertools.pairwise(edges)]
    starts = [int(run.start[0]) for run in by_run]
    lengths = [int(run.end.max()) - start for run, start in zip(by_run, starts, strict=True)]
    ends = np.zeros(len(numbers), int)
    np.maximum.at(ends, transfers.run, transfers.end)
    unbounded = [k for k, row in enumerate(report.rows) if row.compiled.trips is None]
    middle = max(0, len(numbers) // 2 - _DRAWN // 2)
    drawn = range(middle, min(middle + _DRAWN, len(numbers)))
    return {
        "runs": numbers,
        "starts": starts,
        "ends": ends.tolist(),
        "step": find_step(starts) or (median(lengths) if backend.has_ends else None),
        "turns": _count_turns(transfers, unbounded, len(numbers)),
        "devices": len(np.unique(events.device)),
        "exposed": [_measure_exposed(run) for run in by_run],
        "times": _durations(transfers, fold, len(numbers), len(folds), permutes),
        "lanes": [
            _lane(run, transfers, fold, k) if k in drawn else [] for k, run in enumerate(by_run)
        ],
    }


def _events(
    names: EventNames, executions: Executions, backend: Backend, regular: Mapping[int, int]
) -> _Events:
    place = [names.collectives.get(name, (-1, 0)) for name in executions.names]
    row, role = np.array(place, np.int32).reshape(-1, 2).T
    computes = np.array([not _CONTAINER.match(name) for name in executions.names], bool) & (row < 0)
    _, at, device, run, start, end = executions
    events = _Events(run, device, row[at], role.astype(np.int8)[at], computes[at], start, end)
    if backend.runs_kernels:
        # Kernels do not name their run: it is counted, in the order of time, on each device.
        in_time = np.argsort(start, kind="stable")
        events = events.select(in_time)
        order = np.array([names.order.get(name, -1) for name in executions.names], int)[at[in_time]]
        run = np.zeros(len(order), int)
        for one in np.unique(device).tolist():
            own = events.device == one
            run[own] = _count_runs(events.select(own), order[own], regular)
        events = events._replace(run=run, row=np.where(run == _NO_RUN, -1, events.row))
    return events


def find_step(starts: Sequence[int]) -> float | None:
    """Find the median time from one start to the next; None if there are fewer than two."""
    steps = [b - a for a, b in itertools.pairwise(starts)]
    return median(steps) if len(steps) > 1 else None


def _count_turns(transfers: _Events, rows: Sequence[int], runs: int) -> list[list[int]]:
    """Count for each run how often each of some rows was executed on one device."""
    counts = [np.bincount(transfers.run[transfers.row == k], minlength=runs) for k in rows]
    devices = max(1, len(np.unique(transfers.device)))
    return [[int(count[run]) // devices for count in counts] for run in range(runs)]


def find_regular(rows: Sequence[Row]) -> dict[int, int]:
    """Map the rows that all runs execute equally often to how often; to 0, and all, if none is so.

    A computation that is called twice has two rows of one name, of which the last counts.
    """
    named: dict[str, list[int]] = {}
    for k, row in enumerate(rows):
        named.setdefault(row.compiled.name, []).append(k)
    turns = {
        ks[-1]: sum(c.turns for c in some)
        for ks in named.values()
        for some in [[rows[k].compiled for k in ks]]
        if all(c.trips and not c.branches for c in some)
    }
    return turns or dict.fromkeys((ks[-1] for ks in named.values()), 0)


def _count_runs(events: _Events, order: np.ndarray, regular: Mapping[int, int]) -> np.ndarray:
    """Number the runs of a device, where nothing but the order of instructions tells them.

    A run begins where the order falls back by more than half of the program. Collectives wait in
    streams of their own, and are left out if there are two other instructions: one may start before
    the first of these, and belongs to the same run as those after it. In a program of one
    instruction, a run has the `regular` number of collectives, and begins after the longest gaps.
    """
    known, sends = np.flatnonzero(order >= 0), events.row >= 0
    sent, computing = known[sends[known]], known[~sends[known]]
    marks = computing if len(np.unique(order[computing])) > 1 else known
    if len(np.unique(order[marks])) > 1:
        begins = _falls(order[marks])
    elif not (each := sum(regular.get(row, 0) for row in np.unique(events.row[sent]).tolist())):
        return np.full(len(order), _NO_RUN)
    else:
        marks = sent
        gaps = np.append(0, events.start[sent[1:]] - events.end[sent[:-1]])
        # Every `each`-th gap is one between runs: of these sets of gaps, the longest in total.
        begins = np.arange(len(sent)) % each == np.argmax(
            [gaps[k::each].sum() for k in range(each)]
        )
    after = np.searchsorted(marks, np.arange(len(order)), "right")
    number = np.append(0, 1 + np.cumsum(begins))
    runs = number[after]
    ahead = np.append(order[marks].max(), order[marks])[after[sent]] - order[sent]
    # The instruction before it in time is far ahead of it in the program, so it is of the next run,
    # and started before the first instruction that waits for nothing.
    runs[sent] += ahead > np.ptp(order[marks]) / 2
    if len(np.unique(order[sent])) > 1:  # the last of a run's collectives tells the run of others
        falls = _falls(order[sent])
        lasts = sent[np.append(np.flatnonzero(falls) - 1, -1)[np.cumsum(falls)]]
        runs[sent] = np.where(ahead > 0, runs[lasts], number[after[sent]])
    return runs


def _falls(order: np.ndarray) -> np.ndarray:
    return np.diff(order, prepend=order[:1]) < -np.ptp(order) / 2


def _complete_runs(
    events: _Events, regular: Mapping[int, int], backend: Backend, most: int
) -> tuple[list[int], _Events]:
    """Find the numbers of the last complete runs, and their events, with runs counted from 0.

    A run that the profile cuts off, perhaps on one device only, has fewer collectives.
    """
    keys = events.device.astype(np.int64) << 40 | (events.run - events.run.min(initial=0))
    sends = events.row >= 0
    places, own = np.unique(keys[sends], return_inverse=True)  # one for each device and run
    if not len(places):
        return [], events
    device, sends = places >> 40, events.select(sends)
    is_regular = np.isin(sends.row, [*regular])
    counts = np.bincount(own[is_regular], minlength=len(places))
    parts = np.unique(np.stack([sends.row, sends.role]), axis=1)[0]  # starts and ends are two
    least = sum(regular.get(row, 0) for row in parts.tolist())
    if backend.runs_kernels and least:
        counts[counts > least] = 0  # where other work is between, two runs seem one
    expected = counts.max()
    if backend.runs_kernels and expected:  # where an annotation is missing, too, two seem one
        expected = len(seen := np.bincount(counts[counts > 0])) - 1 - seen[::-1].argmax()
    expected = max(expected, least)
    ends, number = np.zeros(len(places), int), np.zeros(len(places), int)
    np.maximum.at(ends, own, sends.end)
    number[own] = sends.run
    if not backend.has_numbers:
        number = _join(device, ends)
    complete = (counts == expected) & (number != _NO_RUN)
    if not (expected and complete.any()):
        return [], events
    found, position = np.unique(number, return_inverse=True)
    devices = len(np.unique(device[complete]))
    whole = np.bincount(position[complete], minlength=len(found)) == devices
    # In the order of their ends; numbers may wrap, as they have 32 bits.
    last = np.zeros(len(found), int)
    np.maximum.at(last, position, ends)
    chosen = np.flatnonzero(whole)[np.argsort(last[whole], kind="stable")][-most:]
    rank = np.full(len(found), -1, np.int32)
    rank[chosen] = np.arange(len(chosen))
    rank = np.where(complete, rank[position], -1)
    at = np.searchsorted(places, keys).clip(max=len(places) - 1)
    run = np.where(places[at] == keys, rank[at], -1)
    del keys, at
    order = np.flatnonzero(run >= 0)
    order = order[np.lexsort((events.start[order], run[order]))]
    return found[chosen].tolist(), events.select(order)._replace(run=run[order])


def _join(device: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Number the runs of devices with one clock by the time at which their collectives end."""
    first = np.sort(ends[device == np.bincount(device).argmax()])
    at = find_nearest(
        first, ends, float(np.median(np.diff(first))) / 2 if len(first) > 1 else np.inf
    )
    return np.where(at < 0, _NO_RUN, at - len(first))


def _transfers(events: _Events, backend: Backend) -> _Events:
    """Join the starts and ends of the collectives of complete runs.

    Where starts have no end, or another number of them, it is not known how long they lasted. GPUs
    have no ends.
    """
    sends = events.select(events.row >= 0)
    ends, begins = sends.role == DONE, sends.role == START
    if backend.runs_kernels:
        begins &= np.isin(sends.row, sends.row[ends])
    begun, done = (
        part.select(np.lexsort((part.start, part.row, part.device, part.run)))
        for part in map(sends.select, (begins, ends))
    )
    # Run, device and row in one number: the n-th start of such a number belongs to its n-th end.
    keys = [x.run.astype(int) << 40 | x.device.astype(int) << 20 | x.row for x in (begun, done)]
    _, place = np.unique(np.concatenate(keys), return_inverse=True)
    first, second = np.split(place, [len(begun.row)])
    pairs = np.bincount(first, minlength=len(place)) == np.bincount(second, minlength=len(place))
    joined = begun.select(pairs[first])._replace(end=done.end[pairs[second]])
    columns = zip(sends.select(~begins & ~ends), joined, strict=True)
    return _Events(*map(np.concatenate, columns))


def _durations(
    transfers: _Events, fold: np.ndarray, runs: int, folds: int, permutes: set[int]
) -> list[list[list[int]]]:
    """Find the durations of each fold in each run, on the device that waited least."""
    order = np.lexsort((transfers.start, transfers.device, fold, transfers.run))
    run, device, fold = transfers.run[order], transfers.device[order], fold[order]
    took = (transfers.end - transfers.start)[order]
    durations: list[list[list[int]]] = [[[] for _ in range(folds)] for _ in range(runs)]
    if not len(took):
        return durations
    changes = np.any(np.diff(np.stack([run, fold, device])), axis=0)
    begin = np.concatenate([[0], np.flatnonzero(changes) + 1])
    end, total = np.append(begin[1:], len(took)), np.add.reduceat(took, begin)
    for k in np.lexsort((-total, fold[begin], run[begin])).tolist():  # the least comes last
        ns = [int(total[k])] if fold[begin[k]] in permutes else took[begin[k] : end[k]].tolist()
        durations[run[begin[k]]][fold[begin[k]]] = ns
    return durations


def _measure_exposed(events: _Events) -> float:
    """Measure a run's nanoseconds of communication without computation, the mean over devices."""
    computing = events.select(events.computes)
    both = events.select(events.computes | (events.row >= 0))
    return (_measure_covered(both) - _measure_covered(computing)) / len(np.unique(events.device))


def _measure_covered(events: _Events) -> int:
    """Measure the union of each device's events, added up."""
    if not len(events.start):
        return 0
    # The spans of devices are moved apart, so that one running maximum serves all.
    shift = events.device.astype(int) * (events.end.max() - events.start.min() + 1)
    order = np.argsort(events.start + shift)
    start, end = (events.start + shift)[order], (events.end + shift)[order]
    until = np.maximum.accumulate(np.append(start[0], end))[:-1]
    return int(np.maximum(end - np.maximum(start, until), 0).sum())


def _lane(
    own: _Events, transfers: _Events, fold: np.ndarray, run: int
) -> list[tuple[int, int, int]]:
    """List (fold, start, end) on the first device, from the run's start; -1 is computation."""
    of_device = own.select(own.device == own.device.min())
    start = int(own.start[0])
    gap = int(of_device.end.max() - start) // _PIECES
    computing = of_device.select(of_device.computes)
    # Events of several streams overlap: one that began earlier may end later. Gaps that nobody
    # would see are closed, as a step has thousands of events.
    until = np.maximum.accumulate(computing.end)
    begins = np.append(True, computing.start[1:] > until[:-1] + gap)[: len(until)]
    ends = np.append(begins[1:], True)[: len(until)]
    computed = (computing.start[begins] - start).tolist(), (until[ends] - start).tolist()
    spans = [(-1, *span) for span in zip(*computed, strict=True)]
    chosen = (transfers.run == run) & (transfers.device == own.device.min())
    sent = (transfers.start[chosen] - start).tolist(), (transfers.end[chosen] - start).tolist()
    return sorted([*spans, *zip(fold[chosen].tolist(), *sent, strict=True)], key=lambda s: s[1])
