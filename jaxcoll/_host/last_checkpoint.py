"""One worker writes the state, and nobody leaves before it has."""

from __future__ import annotations

from collections.abc import Callable

from jaxcoll._host.crew import Crew
from jaxcoll._host.decision import Decision


def written_by_one(
    crew: Crew, decision: Decision, write: Callable[[], object]
) -> tuple[str, OSError | None]:
    """Wait until the first member that can has written the state.

    Law: on every member that returns, the state is written, or nobody could write it. If the writer
    dies, the others hear of it as of any loss, and call this again in the next generation.

    Args:
      crew: of this worker.
      decision: the present one.
      write: writes the state, in its turn.

    Returns:
      The name of the member that has written it, "" if none could; and why this worker could not,
      if it had to and could not.

    Raises:
      RegroupError: a member was lost over it, or it took longer than `crew.startup`.
    """
    failure = None
    for name in decision.members:
        if name == crew.name:
            try:
                write()
            except OSError as error:
                failure = error
        reason = "" if failure is None else repr(failure)
        if not crew.gather(f"written/{name}", reason)[name]:
            return name, failure
    return "", failure
