"""The checkpoint of an elastic run: one worker writes it, and no worker leaves before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxcoll._elastic.membership import Membership

PATIENCE, LAST_PATIENCE = 1.0, 30.0
"""Seconds that another process may be about to replace the file: during a run, and at its end."""


@dataclasses.dataclass(frozen=True)
class Writers:
    """Who writes checkpoints in a generation: the same on all members, who wait for them."""

    names: tuple[str, ...]  # members that have a file, in the order in which they try
    every: int  # steps between two checkpoints, as the first of them has it; 0: there are none

    def are_due(self, before: int, finished: int) -> bool:
        """Whether all compare their states, and the first writes, after these steps."""
        return bool(self.names) and finished // self.every > before // self.every


def writers_of(membership: Membership, every: int) -> Writers:
    """Agree on who writes, by the steps between two checkpoints of each (0: it has no file)."""
    every_of = {name: int(text) for name, text in membership.gather("every", str(every)).items()}
    names = tuple(name for name in membership.generation.members if every_of[name])
    return Writers(names, every_of[names[0]] if names else 0)


def written_by_one(
    membership: Membership, writers: Writers, write: Callable[[], object]
) -> tuple[str, OSError | None]:
    """The writer, which is the first that can, once it has written; and this worker's own error.

    Law: on every member that returns, the state is written, or nobody could write it: the writer is
    "". If it dies, the others find that like any loss, and call this in the next generation.
    """
    failure = None
    for name in writers.names:
        if name == membership.name:
            try:
                write()
            except OSError as error:
                failure = error
        reason = "" if failure is None else repr(failure)
        if not membership.gather(f"written/{name}", reason)[name]:
            return name, failure
    return "", failure
