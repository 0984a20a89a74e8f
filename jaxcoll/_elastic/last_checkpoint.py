"""One worker writes the state, and nobody leaves before it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxcoll._elastic.generation import Decision
from jaxcoll._elastic.membership import Crew


@dataclasses.dataclass(frozen=True)
class Writers:
    """Who writes checkpoints in a generation: the same on all members, who wait for them.

    Attributes:
      names: members that have a file, in the order in which they try.
      every: steps between two checkpoints, as the first of them has it; 0: there are none.
    """

    names: tuple[str, ...]
    every: int

    def are_due(self, finished: int) -> bool:
        """Whether all compare their states, and the first writes, after so many steps."""
        return bool(self.names) and finished % self.every == 0


def writers_of(crew: Crew, decision: Decision, every: int) -> Writers:
    """Agree upon who writes.

    Args:
      crew: of this worker.
      decision: the present one.
      every: steps between two checkpoints; 0: this worker has no file.

    Raises:
      RegroupError: a member was lost over it.
    """
    every_of = {name: int(text) for name, text in crew.gather("every", str(every)).items()}
    names = tuple(name for name in decision.members if every_of[name])
    return Writers(names, every_of[names[0]] if names else 0)


def written_by_one(
    crew: Crew, writers: Writers, write: Callable[[], object]
) -> tuple[str, OSError | None]:
    """Wait until the first writer that can has written the state.

    Law: on every member that returns, the state is written, or nobody could write it. If the writer
    dies, the others hear of it as of any loss, and call this again in the next generation.

    Args:
      crew: of this worker.
      writers: of the present generation.
      write: writes the state, in its turn.

    Returns:
      The name of the worker that has written it, "" if none could; and why this worker could not,
      if it had to and could not.

    Raises:
      RegroupError: a member was lost over it, or it took longer than `crew.startup`.
    """
    failure = None
    for name in writers.names:
        if name == crew.name:
            try:
                write()
            except OSError as error:
                failure = error
        reason = "" if failure is None else repr(failure)
        if not crew.gather(f"written/{name}", reason)[name]:
            return name, failure
    return "", failure
