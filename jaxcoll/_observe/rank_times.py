"""Reduce one process's profile to what the others need: times of collectives, run by run."""

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
"""Instructions that contain others, which have events of their own."""
_DRAWN = 9
"""Runs in the middle, of which lanes are kept: other ranks may lack the first and the last."""
_PIECES = 400  # what a lane of the picture can show: shorter gaps between computations are closed

Span = tuple[int, int]


def programs_of(
    reports: Mapping[str, Report], numbers: Mapping[str, set[int]], events: Iterable[Event]
) -> tuple[dict[str, list[Event]], list[str]]:
    """Sort events by the programs they belong to, and return notes of what could not be told.

    A program is recognized by its name and its collectives, and among several of these by its
    number, if all of that name have theirs: what comes from the persistent cache has the number
    of another process's.
    """
    by_number: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        by_number[event.module, event.program].append(event)
    fitting: dict[tuple[str, int], list[str]] = {}
    for (module, number), own in by_number.items():
        instructions = {event.instruction for event in own}
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
    """Return times of the last `most` complete runs, in plain values; None without any.

    Of each run: its number, its start and the end of its last collective (nanoseconds), its exposed
    communication, and the durations of each fold on the device that waited least; of some in the
    middle, what the first device did when. With it, the median from one start to the next.
    """
    folds = folds_of(report.rows)
    fold_of = {report.rows[k].compiled.name: n for n, ks in enumerate(folds) for k in ks}
    kinds = [report.rows[ks[0]].compiled.kind for ks in folds]
    permutes = {n for n, kind in enumerate(kinds) if kind == "collective-permute"}
    by_run: dict[int, list[Event]] = defaultdict(list)
    for event in _numbered(report.collectives, events):
        by_run[event.run or 0].append(event)
    # A run that the profile cuts off lacks some.
    required = _required(report.collectives)
    counts = {
        run: sum(event.instruction in required for event in own) for run, own in by_run.items()
    }
    whole = max(counts.values(), default=0)
    runs = [run for run in by_run if whole and counts[run] == whole]
    runs = sorted(runs, key=lambda run: by_run[run][0].start)[-most:]
    if not runs:
        return None
    middle = max(0, len(runs) // 2 - _DRAWN // 2)
    drawn = runs[middle : middle + _DRAWN]
    starts = [by_run[run][0].start for run in runs]
    steps = [b - a for a, b in itertools.pairwise(starts)]
    lengths = [
        max(event.end for event in by_run[run]) - start
        for run, start in zip(runs, starts, strict=True)
    ]
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
    """Return those that every run carries out equally often, or else all."""
    regular = {c.name for c in collectives if not c.branches and c.trips is not None}
    return regular or {c.name for c in collectives}


def _numbered(collectives: Sequence[Collective], events: Sequence[Event]) -> Iterable[Event]:
    """Number runs below 0 where the profile does not: by how often an instruction came later."""
    if not events or events[0].run is not None:
        return events
    turns = Counter({c.name: 0 for c in collectives})
    for c in collectives:
        turns[c.name] += c.turns
    left: Counter[tuple[str, int]] = Counter()
    run_of_device: dict[int, int] = defaultdict(lambda: -1)
    numbered = []
    for event in reversed(events):
        if event.instruction in turns:
            place = event.instruction, event.device
            run_of_device[event.device] = -1 - left[place] // turns[event.instruction]
            left[place] += 1
        numbered.append(event._replace(run=run_of_device[event.device]))
    return reversed(numbered)


def _durations(
    events: Sequence[Event], fold_of: dict[str, int], permutes: set[int]
) -> list[list[int]]:
    """Return for each fold the durations in one run, on the device that waited least."""
    by_fold: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if (fold := fold_of.get(event.instruction)) is not None:
            by_fold[fold][event.device].append(event.end - event.start)
    least = [
        min(by_fold[n].values(), key=sum, default=[]) for n in range(max(fold_of.values()) + 1)
    ]
    return [[sum(ns)] if n in permutes and ns else ns for n, ns in enumerate(least)]


def _exposed(events: Sequence[Event], fold_of: dict[str, int]) -> float:
    """Return nanoseconds in which a device communicates and does not compute, the devices' mean."""
    devices = {event.device for event in events}
    lengths = []
    for device in devices:
        own = [event for event in events if event.device == device]
        sent = _union((e.start, e.end) for e in own if e.instruction in fold_of)
        computed = _union((e.start, e.end) for e in own if _computes(e, fold_of))
        common = _length(sent) + _length(computed) - _length(_union([*sent, *computed]))
        lengths.append(_length(sent) - common)
    return sum(lengths) / len(lengths)


def _computes(event: Event, fold_of: dict[str, int]) -> bool:
    return event.instruction not in fold_of and not _CONTAINER.match(event.instruction)


def _lane(events: Sequence[Event], fold_of: dict[str, int]) -> list[tuple[int, int, int]]:
    """Return (fold, start, end) from the run's start, on its first device; -1 is computation."""
    device, start = min(event.device for event in events), events[0].start
    own = [event for event in events if event.device == device]
    gap = (max(event.end for event in own) - start) // _PIECES
    computed = _union(((e.start, e.end) for e in own if _computes(e, fold_of)), gap)
    spans = [(-1, a - start, b - start) for a, b in computed]
    spans += [
        (fold_of[e.instruction], e.start - start, e.end - start)
        for e in own
        if e.instruction in fold_of
    ]
    return sorted(spans, key=lambda span: span[1])


def _union(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Return the union as spans apart; those with at most `gap` between them are one."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1] + gap:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def _length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)
