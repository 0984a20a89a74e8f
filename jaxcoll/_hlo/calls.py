"""Flatten computations that call one another into the list that one run of the program executes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxcoll._hlo.collective import Collective, Loop, Matmul, Meanwhile
from jaxcoll._hlo.hlo_text import Module


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of one computation by another."""

    site: str  # the calling instruction
    callee: str  # the computation that it calls
    trips: int | None = 1  # executions of `callee` in each execution of `site`; None if unknown
    is_async: bool = False  # other work may run between its start and its end
    branch: int | None = None  # the number of the branch, if `site` is a conditional
    is_loop: bool = False  # `site` is a loop
    # `callee` defines what the single instruction `site` computes, such as a fusion
    is_part: bool = False
    scatters: bool = False  # an all-reduce in it is a reduce-scatter: each device keeps its share
    at: int = 0  # the line of `site` in its computation
    until: int = 0  # the line where it ends, if it is asynchronous
    meanwhile: Meanwhile | None = None  # the work scheduled between the two


Item = Collective | Call | Matmul
Bodies = Mapping[str, Sequence[Item]]
"""The items of each computation, in the order of its lines."""

Event = Collective | Matmul | Loop
"""An entry in the list of what one run executes."""


def flatten_calls(bodies: Bodies, module: Module, lengths: Mapping[str, int]) -> tuple[Event, ...]:
    """List what one run executes, each with the loops and branches around it.

    A computation with two callers is listed twice, because both send. Positions count the program's
    lines with every call inlined.

    Raises:
      ValueError: a computation is missing or calls itself, or no call reaches a collective.
    """
    relevant = find_containing(bodies, module, (Collective, Matmul))
    reached: set[str] = set()
    extents: dict[str, int] = {}

    def extent(name: str) -> int:
        """Count the instructions of a computation with its calls inlined."""
        if name not in extents:
            extents[name] = lengths.get(name, 0)  # ends the recursion if it calls itself
            extents[name] += sum(extent(call.callee) for call in _calls(bodies[name], relevant))
        return extents[name]

    def walk(name: str, path: tuple[Call, ...], base: int) -> Iterator[Event]:
        if any(name == call.callee for call in path[:-1]):
            raise ValueError(f"{name!r} calls itself, which HLO does not allow: damaged text.")
        reached.add(name)
        calls = _calls(bodies[name], relevant)
        lines = [call.at for call in calls]
        grown = [0, *itertools.accumulate(extent(call.callee) for call in calls)]

        def place(line: int) -> int:
            return base + line + grown[bisect.bisect_left(lines, line)]

        callees = iter(grown)
        for item in bodies[name]:
            if isinstance(item, Collective):
                yield _place_collective(item, path, place(item.at), place(item.until))
            elif isinstance(item, Matmul):
                yield dataclasses.replace(
                    item, trips=_multiply_trips(item.trips, path), at=place(item.at)
                )
            elif item.callee in relevant:
                # The calls of one line, such as a loop's condition and body, follow one another.
                start = base + item.at + next(callees)
                call = dataclasses.replace(item, at=place(item.at), until=place(item.until))
                if item.is_loop:
                    end = start + extent(item.callee)
                    yield Loop(item.site, _multiply_trips(item.trips, path), start, end)
                yield from walk(item.callee, (*path, call), start)

    events = tuple(walk(module.entry, (), 0)) if module.entry in bodies else ()
    called = {x.callee for body in bodies.values() for x in body if isinstance(x, Call)}
    # A collective that no call reaches would be missing from the report, which would mislead.
    for name in sorted(relevant - reached):
        lost = next((x for x in bodies[name] if isinstance(x, Collective)), None)
        outer = name
        while outer in module.nested:
            outer = module.nested[outer]
        # In a text that defines computations where they are called, some have a copy with a name.
        is_copy = module.nested and outer not in called and outer != module.entry
        if lost is not None and not is_copy:
            raise ValueError(
                f"{lost.kind} {lost.name!r} is in {name!r}, which no instruction calls in a known "
                "way: the notation is newer than this version of jaxcoll, or the text is damaged."
            )
    return events


def find_containing(bodies: Bodies, module: Module, kinds: tuple[type, ...]) -> set[str]:
    """Find the computations that contain one of `kinds`, directly or through calls."""
    callers: dict[str, list[str]] = {}
    for name, body in bodies.items():
        for item in body:
            if isinstance(item, Call):
                if item.callee not in module.computations:
                    raise ValueError(
                        f"{item.site!r} calls {item.callee!r}, which is not defined: the text "
                        "looks truncated."
                    )
                callers.setdefault(item.callee, []).append(name)
    waiting = [name for name, body in bodies.items() if any(isinstance(x, kinds) for x in body)]
    names: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += callers.get(name, [])
    return names


def _calls(body: Sequence[Item], relevant: set[str]) -> list[Call]:
    return [item for item in body if isinstance(item, Call) and item.callee in relevant]


def _multiply_trips(trips: int | None, path: Sequence[Call]) -> int | None:
    for call in path:
        trips = None if trips is None or call.trips is None else trips * call.trips
    return trips


def _place_collective(
    collective: Collective, path: Sequence[Call], at: int, until: int
) -> Collective:
    """Give `collective` the trip count, loops and branches of the calls that lead to it."""
    branches = tuple(
        ("/".join(c.site for c in path[: k + 1]), call.branch)
        for k, call in enumerate(path)
        if call.branch is not None
    )
    # An asynchronous call (async-start of a computation) makes everything in it asynchronous.
    pair = next((call for call in path if call.is_async), None)  # the start and done around it
    is_scattered = collective.kind == "all-reduce" and any(call.scatters for call in path)
    return dataclasses.replace(
        collective,
        kind="reduce-scatter" if is_scattered else collective.kind,
        trips=_multiply_trips(collective.trips, path),
        is_async=collective.is_async or pair is not None,
        branches=branches,
        loops=tuple(call.site for call in path if call.is_loop),
        at=pair.at if pair else at,
        until=pair.until if pair else max(at, until),
        meanwhile=pair.meanwhile if pair else collective.meanwhile,
    )
