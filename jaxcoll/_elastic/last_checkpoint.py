"""The checkpoint of an elastic run: one worker writes it, and no worker leaves before."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import jax

from jaxcoll._elastic.checkpoint import Stamp, restore_checkpoint, save_newest, stamp_of_checkpoint
from jaxcoll._elastic.generation import Generation
from jaxcoll._elastic.membership import Membership
from jaxcoll._elastic.replicated_state import ReplicatedState

_LOG = logging.getLogger("jaxcoll")

PATIENCE, LAST_PATIENCE = 1.0, 30.0
"""Seconds that another process may be about to replace the file: during a run, and at its end."""


class CheckpointFile:
    """The file of a run, in which a newer state is never replaced by an older one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def restore(self, state: ReplicatedState) -> None:
        """Begin with the state in the file, if there is one."""
        if self.path.exists():
            state.reset(*restore_checkpoint(self.path, state.like()))
            state.term = stamp_of_checkpoint(self.path).term

    def save(self, state: ReplicatedState, step: int, patience: float) -> Stamp:
        """Write the state after `step`, unless a later one is there; the stamp of the file then."""
        if step not in state.held:
            raise OSError(f"worker {jax.process_index()} does not hold the state after step {step}")
        found = save_newest(self.path, state.to_save(step), Stamp(step, state.term), patience)
        if found.step > step:
            words = "%s holds the state after step %d, and stays: that after step %d is older."
            _LOG.warning(words, self.path, found.step, step)
        return found


@dataclasses.dataclass(frozen=True)
class Writers:
    """Who writes checkpoints in a generation: the same on all members, who wait for them."""

    names: tuple[str, ...]  # members that have a file, in the order in which they try
    every: int  # steps between two checkpoints, as the first of them has it; 0: there are none

    def are_due(self, before: int, finished: int) -> bool:
        """Whether all compare their states, and the first writes, after these steps."""
        return bool(self.names) and finished // self.every > before // self.every


def writers_of(membership: Membership, generation: Generation, every: int) -> Writers:
    """Agree on who writes, by the steps between two checkpoints of each (0: it has no file)."""
    every_of = {name: int(text) for name, text in membership.gather("every", str(every)).items()}
    names = tuple(name for name in generation.members if every_of[name])
    return Writers(names, every_of[names[0]] if names else 0)


def written_by_one(
    membership: Membership, writers: Writers, write: Callable[[], object]
) -> tuple[str, OSError | None]:
    """Wait until the first writer that can has written the state.

    Law: on every member that returns, the state is written, or nobody could write it. If the writer
    dies, the others find that like any loss, and call this again in the next generation.

    Returns:
      The name of the worker that has written it, "" if none could; and the error of this worker, if
      its turn came and it failed.
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
