"""Reduce one process's profile to the times of collectives in each run, for other ranks to read."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from jaxcoll._observe.measured import folds_of
from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.profile import Event
from jaxcoll._observe.report import Report

_CONTAINER = re.compile(r"(?:while|conditional|call)(?:[.\-_]\d+)*$")
"""Instructions that contain others; these have their own events."""
_DRAWN = 9
"""The runs in the middle whose lanes are kept: other ranks may not have the first and the last."""
_PIECES = 400  # resolution of a lane in the picture: shorter gaps between computations are closed

Span = tuple[int, int]


def programs_of(
    reports: Mapping[str, Report], numbers: Mapping[str, set[int]], events: Iterable[Event]
) -> tuple[dict[str, list[Event]], list[str]]:
    """Group events by program, and return notes on programs that are ambiguous.

    A program is identified by its name and its collectives. If several match, its number decides,
    unless one of that name has an unknown number: one from the persistent cache has another's.
    """
    by_number: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        by_number[event.module, event.program].append(event)
    fitting: dict[tuple[str, int], list[str]] = {}
    for (module, number), program_events in by_number.items():
        instructions = {event.instruction for event in program_events}
        fitting[module, number] = [
            key
            for key, report in reports.items()
            if report.name == module and _required(report.collectives) <= instructions
        ]  # fmt: skip
    unsure = {
        module
        for (module, number), keys in fitting.items()
        if keys and not any(number in numbers[key] for key in keys)
    }
    of_program: dict[str, list[Event]] = defaultdict(list)
    notes = []
    for (module, number), keys in fitting.items():
        if len(keys) > 1:
            keys = [key for key in keys if number in numbers[key] and module not in unsure]
            if len(keys) != 1:
                notes.append(
                    f"several programs are called {module}, and the profile does not tell them "
                    "apart: they were not measured."
                )
        if len(keys) == 1:
            of_program[keys[0]] += by_number[module, number]
    return of_program, list(dict.fromkeys(notes))


def times_of(report: Report, events: Sequence[Event], most: int) -> dict[str, Any] | None:
    """Return the times of the last `most` complete runs, in nanoseconds; None if there are none.

    For each run: its number, its start, the end of its last collective, its exposed communication,
    and the durations of each fold on the device that waited least. For some in the middle: the
    lane of the first device. "step" is the median time from one start to the next.
    """
    folds = folds_of(report.rows)
    fold_of = {report.rows[k].compiled.name: n for n, ks in enumerate(folds) for k in ks}
    kinds = [report.rows[ks[0]].compiled.kind for ks in folds]
    permutes = {n for n, kind in enumerate(kinds) if kind == "collective-permute"}
    by_run: dict[int, list[Event]] = defaultdict(list)
    for event in _numbered(report.collectives, events):
        by_run[event.run or 0].append(event)
    # A run that the beginning or end of the profile cuts off has fewer collectives.
    required = _required(report.collectives)
    counts = {run: sum(e.instruction in required for e in by_run[run]) for run in by_run}
    complete = max(counts.values(), default=0)
    runs = [run for run in by_run if complete and counts[run] == complete]
    runs = sorted(runs, key=lambda run: by_run[run][0].start)[-most:]
    if not runs:
        return None
    middle = max(0, len(runs) // 2 - _DRAWN // 2)
    drawn = runs[middle : middle + _DRAWN]
    starts = [by_run[run][0].start for run in runs]
    steps = [b - a for a, b in itertools.pairwise(starts)]
    lengths = [max(event.end for event in by_run[run]) - by_run[run][0].start for run in runs]
    return {
        "runs": runs,
        "starts": starts,
        "ends": [
            max(event.end for event in by_run[run] if event.instruction in fold_of) for run in runs
        ],
        "step": median(steps or lengths),
        "exposed": [_exposed(by_run[run], fold_of) for run in runs],
        "times": [_durations(by_run[run], fold_of, permutes) for run in runs],
        "lanes": [_lane(by_run[run], fold_of) if run in drawn else [] for run in runs],
    }


def _required(collectives: Iterable[Collective]) -> set[str]:
    """Return names of the collectives that all runs execute equally often; of all if none do."""
    regular = {c.name for c in collectives if not c.branches and c.trips is not None}
    return regular or {c.name for c in collectives}


def _numbered(collectives: Sequence[Collective], events: Sequence[Event]) -> Iterable[Event]:
    """Number runs that the profile does not, from -1 for the last, by counting collectives."""
    if not events or events[0].run is not None:
        return events
    turns = Counter({c.name: 0 for c in collectives})
    for c in collectives:
        turns[c.name] += c.turns
    later: Counter[tuple[str, int]] = Counter()
    run_of_device: dict[int, int] = defaultdict(lambda: -1)
    numbered = []
    for event in reversed(events):
        if event.instruction in turns:
            place = event.instruction, event.device
            run_of_device[event.device] = -1 - later[place] // turns[event.instruction]
            later[place] += 1
        numbered.append(event._replace(run=run_of_device[event.device]))
    return reversed(numbered)


def _durations(
    events: Sequence[Event], fold_of: dict[str, int], permutes: set[int]
) -> list[list[int]]:
    """Return the durations of each fold in one run, on the device that waited least."""
    by_fold: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if (fold := fold_of.get(event.instruction)) is not None:
            by_fold[fold][event.device].append(event.end - event.start)
    least = [
        min(by_fold[n].values(), key=sum, default=[]) for n in range(max(fold_of.values()) + 1)
    ]
    return [[sum(ns)] if n in permutes and ns else ns for n, ns in enumerate(least)]


def _exposed(events: Sequence[Event], fold_of: dict[str, int]) -> float:
    """Return the nanoseconds of communication without computation, the mean over devices."""
    devices = {event.device for event in events}
    lengths = []
    for device in devices:
        of_device = [event for event in events if event.device == device]
        sent = _union((e.start, e.end) for e in of_device if e.instruction in fold_of)
        computed = _union((e.start, e.end) for e in of_device if _computes(e, fold_of))
        lengths.append(_length(_union([*sent, *computed])) - _length(computed))
    return sum(lengths) / len(lengths)


def _computes(event: Event, fold_of: dict[str, int]) -> bool:
    return event.instruction not in fold_of and not _CONTAINER.match(event.instruction)


def _lane(events: Sequence[Event], fold_of: dict[str, int]) -> list[tuple[int, int, int]]:
    """Return (fold, start, end) on the first device, from the run's start; -1 is computation."""
    device, start = min(event.device for event in events), events[0].start
    of_device = [event for event in events if event.device == device]
    gap = (max(event.end for event in of_device) - start) // _PIECES
    computed = _union(((e.start, e.end) for e in of_device if _computes(e, fold_of)), gap)
    spans = [(-1, a - start, b - start) for a, b in computed]
    spans += [
        (fold_of[e.instruction], e.start - start, e.end - start)
        for e in of_device
        if e.instruction in fold_of
    ]
    return sorted(spans, key=lambda span: span[1])


def _union(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Return the union as disjoint spans; joins spans that are at most `gap` apart."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1] + gap:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def _length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)
