"""The checkpoints of an elastic run: who writes them, and when."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxcoll._job.threads import Task, Worker
from jaxcoll._job.timing import LAST_LOCK_SECONDS, LOCK_SECONDS
from jaxcoll._train.elastic.membership import Membership
from jaxcoll._train.elastic.replicated_state import ReplicatedState

_LOG = logging.getLogger("jaxcoll")


class Checkpoints:
    """The checkpoints of one run; the first member that has a file writes them."""

    def __init__(
        self,
        membership: Membership,
        state: ReplicatedState,
        file: Path | None,
        every: int,  # steps between two checkpoints
        patience: float,  # seconds for one that is being written
    ) -> None:
        self._membership, self._state, self._file = membership, state, file
        self._patience, self._every = patience, 0
        self.own_every = every if file else 0
        self.writers: tuple[str, ...] = ()
        # It writes during the next steps, because a checkpoint may take longer than a step.
        self._worker = Worker("jaxcoll-checkpoint")
        self._writing: Task | None = None

    def choose(self, every_of: Mapping[str, int]) -> None:
        members = self._membership.generation.members
        self.writers, self._every = choose_writers(members, every_of)

    def are_due(self, before: int, finished: int) -> bool:
        return bool(self.writers) and finished // self._every > before // self._every

    def save(self, step: int) -> None:
        """Begin to write the state after `step`, if this worker writes."""
        if self._membership.name != self.writers[0] or self._file is None:
            return
        if self._writing is not None and not self._writing.is_done():
            _LOG.warning("No checkpoint after step %d: the last is still being written.", step)
            return
        write = self._state.prepare_save(self._file, step, LOCK_SECONDS)
        self._writing = self._worker.submit(functools.partial(_call_or_warn, write))

    def save_last(self, step: int) -> tuple[str, OSError | None]:
        """Write the state after `step`; see `write_once`."""

        def write() -> None:
            if self._file:  # only writers have one; the others wait for them
                self._await_writing()
                self._state.prepare_save(self._file, step, LAST_LOCK_SECONDS)()

        return write_once(self._membership, self.writers, write)

    def close(self) -> None:
        self._await_writing()
        self._worker.close()

    def _await_writing(self) -> None:
        if self._writing is not None:
            self._writing.wait(self._patience)


def _call_or_warn(write: Callable[[], object]) -> None:
    """Write a checkpoint, or log the error: a later one may succeed, and the last one must."""
    try:
        write()
    except Exception as error:
        _LOG.warning("%s %s", error, " ".join(getattr(error, "__notes__", ())))


def choose_writers(
    members: Sequence[str], every_of: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    """Choose who writes checkpoints, and how often; 0 stands for a worker without a file.

    Returns:
      The members that have a file, in the order in which they try to write; and the first one's
      number of steps between two checkpoints.
    """
    names = tuple(name for name in members if every_of[name])
    return names, every_of[names[0]] if names else 0


def write_once(
    membership: Membership, writers: Sequence[str], write: Callable[[], object]
) -> tuple[str, OSError | None]:
    """Let the first writer that can write the state; return its name and this worker's error.

    Guarantee: when this returns, on any member, the state is written, or nobody could write it and
    the name is "". If the writer dies, the others notice as with any loss, and call this again in
    the next generation.
    """
    failure = None
    for name in writers:
        if name == membership.name:
            try:
                write()
            except OSError as error:
                failure = error
        reason = "" if failure is None else repr(failure)
        if not membership.gather(f"written/{name}", reason)[name]:
            return name, failure
    return "", failure
