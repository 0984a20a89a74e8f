"""From computations that call one another to the collectives of one run of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
    """The collectives that a run of `entry` meets, with trips, branches and asynchrony of all calls.

    Law: a computation called from two places is met twice, because both send; one that is not
    reached, and holds a collective, is an error rather than silence.

    Args:
      bodies: every computation of the program.
      entry: the one that runs.

    Returns:
      The collectives, in program order.

    Raises:
      ValueError: a call leads nowhere, or a collective is reached by no call.
    """
    busy: dict[str, bool] = {}

    def is_busy(name: str) -> bool:
        if name not in bodies:
            raise ValueError(
                f"the program calls {name!r}, which it does not define: the text looks cut off."
            )
        if name not in busy:
            busy[name] = False  # a computation cannot call itself; this ends the search if it does
            busy[name] = any(not isinstance(x, Call) or is_busy(x.callee) for x in bodies[name])
        return busy[name]

    reached: set[str] = set()
    found = _within(bodies, entry, is_busy, reached) if is_busy(entry) else ()
    for name, body in bodies.items():
        idle = name not in reached and [x for x in body if isinstance(x, Collective)]
        if idle:
            raise ValueError(
                f"{idle[0].kind} {idle[0].name!r} stands in {name!r}, which nothing calls in a way "
                "that is understood here: the notation is newer than this reader, or the text is "
                "damaged."
            )
    return tuple(found)


def _within(bodies, entry, is_busy, reached):
    ...
