"""Flatten computations that call one another into what one run of the program carries out."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxcoll._observe.parse.collective import Collective, Loop, Matmul, Meanwhile


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A computation carried out from within another."""

    site: str  # the instruction that calls
    callee: str  # the computation that it calls
    trips: int | None = 1  # how often, each time; None when the text does not say
    is_async: bool = False  # other work may run meanwhile
    branch: int | None = None  # the number of the branch, when `site` is a conditional
    is_loop: bool = False  # `site` is a loop
    # `callee` spells out what `site` does, as for a fusion, rather than a program
    is_part: bool = False
    at: int = 0  # the line of `site` in its computation
    until: int = 0  # the line where it ends, when it is asynchronous
    meanwhile: Meanwhile | None = None  # what is scheduled between the two


Item = Collective | Call | Matmul
Bodies = Mapping[str, Sequence[Item]]
"""The items of each computation, in its order."""

Event = Collective | Matmul | Loop
"""Something that one run carries out."""


def carried_out(bodies: Bodies, entry: str, lengths: Mapping[str, int]) -> tuple[Event, ...]:
    """List what one run of `entry` carries out, each with the loops and branches around it.

    A computation that is called from two places is listed twice, because both send. Places count
    through the program as if each call were written out.

    Raises:
      ValueError: a call leads nowhere or in a circle, or a collective is reached by no call.
    """
    busy = busy_among(bodies, (Collective, Matmul))
    reached: set[str] = set()
    extents: dict[str, int] = {}

    def extent(name: str) -> int:
        """Count the instructions of a computation with its calls written out."""
        if name not in extents:
            extents[name] = lengths.get(name, 0)  # stays if it calls itself, as `within` refuses
            extents[name] += sum(extent(call.callee) for call in _calls(bodies[name], busy))
        return extents[name]

    def within(name: str, path: tuple[Call, ...], base: int) -> Iterator[Event]:
        if any(name == call.callee for call in path[:-1]):
            raise ValueError(f"{name!r} calls itself, which no program does: the text is damaged.")
        reached.add(name)
        calls = _calls(bodies[name], busy)
        lines = [call.at for call in calls]
        grown = [0, *itertools.accumulate(extent(call.callee) for call in calls)]

        def place(line: int) -> int:
            return base + line + grown[bisect.bisect_left(lines, line)]

        callees = iter(grown)
        for item in bodies[name]:
            if isinstance(item, Collective):
                yield _reached(item, path, place(item.at), place(item.until))
            elif isinstance(item, Matmul):
                yield dataclasses.replace(item, trips=_trips(item.trips, path), at=place(item.at))
            elif item.callee in busy:
                # Calls of one line, as a loop's condition and body, lie one behind another.
                start = base + item.at + next(callees)
                call = dataclasses.replace(item, at=place(item.at), until=place(item.until))
                if item.is_loop:
                    end = start + extent(item.callee)
                    yield Loop(item.site, _trips(item.trips, path), start, end)
                yield from within(item.callee, (*path, call), start)

    events = tuple(within(entry, (), 0))
    # What no call reaches would not be listed, and a report that lists less than all misleads.
    for name in sorted(busy - reached):
        lost = next((x for x in bodies[name] if isinstance(x, Collective)), None)
        if lost is not None:
            raise ValueError(
                f"{lost.kind} {lost.name!r} stands in {name!r}, which nothing calls in a way that "
                "is understood here: the notation is newer than this reader, or the text is "
                "damaged."
            )
    return events


def busy_among(bodies: Bodies, kinds: tuple[type, ...]) -> set[str]:
    """Name the computations that hold one of `kinds`, or call one that does, however far down."""
    callers: dict[str, list[str]] = {}
    for name, body in bodies.items():
        for item in body:
            if isinstance(item, Call):
                if item.callee not in bodies:
                    raise ValueError(
                        f"{item.site!r} calls {item.callee!r}, which is not defined: the text "
                        "looks cut off."
                    )
                callers.setdefault(item.callee, []).append(name)
    waiting = [name for name, body in bodies.items() if any(isinstance(x, kinds) for x in body)]
    busy: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in busy:
            busy.add(name)
            waiting += callers.get(name, [])
    return busy


def _calls(body: Sequence[Item], busy: set[str]) -> list[Call]:
    return [item for item in body if isinstance(item, Call) and item.callee in busy]


def _trips(trips: int | None, path: Sequence[Call]) -> int | None:
    for call in path:
        trips = None if trips is None or call.trips is None else trips * call.trips
    return trips


def _reached(collective: Collective, path: Sequence[Call], at: int, until: int) -> Collective:
    """Place `collective` at the end of a path of calls."""
    branches = tuple(
        ("/".join(c.site for c in path[: k + 1]), call.branch)
        for k, call in enumerate(path)
        if call.branch is not None
    )
    # An asynchronous call (async-start of a computation) makes all within it asynchronous.
    pair = next((call for call in path if call.is_async), None)  # the pair is around it
    return dataclasses.replace(
        collective,
        trips=_trips(collective.trips, path),
        is_async=collective.is_async or pair is not None,
        branches=branches,
        loops=tuple(call.site for call in path if call.is_loop),
        at=pair.at if pair else at,
        until=pair.until if pair else max(at, until),
        meanwhile=pair.meanwhile if pair else collective.meanwhile,
    )
