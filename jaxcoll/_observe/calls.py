"""From computations that call one another to the collectives of one run of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxcoll._observe.collective import Collective


@dataclasses.dataclass(frozen=True)
class Call:
    """A computation carried out from within another.

    Attributes:
      site: the instruction that calls.
      callee: the computation that it calls.
      trips: how often, each time; None when that is not said.
      is_async: other work may run meanwhile.
      branch: which branch it is, when `site` is a conditional.
    """

    site: str
    callee: str
    trips: int | None = 1
    is_async: bool = False
    branch: int | None = None


Bodies = Mapping[str, Sequence[Collective | Call]]
"""What matters of each computation, in its order."""


def carried_out(bodies: Bodies, entry: str) -> tuple[Collective, ...]:
    """The collectives of one run of `entry`, each with the loops and branches it is called in.

    Law: a computation that is called from two places is listed twice, because both send; a
    collective that no call reaches is an error rather than silence.

    Args:
      bodies: every computation of the program.
      entry: the one that runs.

    Returns:
      The collectives, in program order.

    Raises:
      ValueError: a call leads nowhere or in a circle, or a collective is reached by no call.
    """
    busy = _busy(bodies)
    reached: set[str] = set()

    def within(name: str, path: tuple[Call, ...]) -> Iterator[Collective]:
        if any(name == call.callee for call in path[:-1]):
            raise ValueError(f"{name!r} calls itself, which no program does: the text is damaged.")
        reached.add(name)
        for item in bodies[name]:
            if isinstance(item, Collective):
                yield _called(item, path)
            elif item.callee in busy:
                yield from within(item.callee, (*path, item))

    found = tuple(within(entry, ()))
    for name in sorted(busy - reached):
        lost = next((x for x in bodies[name] if isinstance(x, Collective)), None)
        if lost is not None:
            raise ValueError(
                f"{lost.kind} {lost.name!r} stands in {name!r}, which nothing calls in a way that "
                "is understood here: the notation is newer than this reader, or the text is "
                "damaged."
            )
    return found


def _busy(bodies: Bodies) -> set[str]:
    """The computations that hold a collective, or call one that does, however far down."""
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
    waiting = [
        name for name, body in bodies.items() if any(isinstance(x, Collective) for x in body)
    ]
    busy: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in busy:
            busy.add(name)
            waiting += callers.get(name, [])
    return busy


def _called(collective: Collective, path: Sequence[Call]) -> Collective:
    """`collective` as it is met at the end of a path of calls."""
    trips = collective.trips
    for call in path:
        trips = None if trips is None or call.trips is None else trips * call.trips
    branches = tuple(
        ("/".join(c.site for c in path[: k + 1]), call.branch)
        for k, call in enumerate(path)
        if call.branch is not None
    )
    return dataclasses.replace(
        collective,
        trips=trips,
        is_async=collective.is_async or any(call.is_async for call in path),
        branches=branches,
    )
