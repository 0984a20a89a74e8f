"""Run one job on this host: its processes from their start to their certain end."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from jaxcoll._cluster.launch.output import Lines
from jaxcoll._cluster.launch.subprocesses import Running, surely_ended
from jaxcoll._cluster.launchers import REJOIN

GRACE = 5.0
"""Seconds that processes have to end when they are asked to."""

SETTLES = 4.0
"""Seconds after which survivors of a failure have found out whether they can go on."""

_POLL_SECONDS = 0.05


@dataclasses.dataclass
class Outcome:
    """How a job ended."""

    # Of each process: its exit status, or the negative number of the signal that ended it; None: it
    # was ended here
    statuses: list[int | None]
    # The ranks that failed by themselves, the first one first
    failed: list[int] = dataclasses.field(default_factory=list)
    late: bool = False  # whether the time was up
    interrupted: int = 0  # the signal by which the job was to end; 0: none


class Owner:
    """Whoever starts a job, and is called while it runs; none of these may wait."""

    # That came so far; the first one ends the job, a second one takes the grace away
    signals: Sequence[int] = ()

    def show(self, rank: int, stream: str, piece: bytes) -> None:
        """A process printed this; see `Lines`."""
        raise NotImplementedError

    def has_room(self, stream: str) -> bool:
        """Whether more can be shown; else processes wait, as they would for any reader."""
        return True

    def look(self) -> None:
        """Called now and then."""

    def may_restart(self, rank: int, status: int) -> bool:
        """Whether a process that failed is started again, to rejoin those that run."""
        return False


class Job:
    """One process for each set of environment variables, which are added to this process's."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        owner: Owner,
        *,
        keep_going: bool = False,
    ) -> None:
        self._command, self._variables = command, variables
        self._owner, self._keep_going = owner, keep_going
        self._outcome = Outcome([None] * len(variables))
        self._lines = Lines(owner.show, owner.has_room)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed_at: dict[int, float] = {}

    def run(self, timeout: float | None, grace: float = GRACE) -> Outcome:
        """Run it to its end; no process outlives this call."""
        # `grace`: seconds between asking processes to end and killing them.
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        owner, outcome = self._owner, self._outcome
        with surely_ended() as running, contextlib.ExitStack() as at_end:
            at_end.callback(self._lines.finish)
            for rank in range(len(self._variables)):
                self._start(running, rank)
            while None in outcome.statuses:
                self._note_ended()
                outcome.interrupted = owner.signals[0] if owner.signals else 0
                outcome.late = time.monotonic() > until and None in outcome.statuses
                failed = outcome.failed and not self._keep_going
                if failed or outcome.interrupted or outcome.late:
                    break
                self._lines.pass_on(_POLL_SECONDS)
                owner.look()
                self._restart(running)
            if grace:
                self._ask_to_end(running, grace)
        return outcome

    def _start(self, running: Running, rank: int, **more: str) -> None:
        process = running.start(
            self._command, {**self._variables[rank], **more},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines.of(rank, process)
        self._processes[rank] = process

    def _note_ended(self) -> None:
        statuses, new = self._outcome.statuses, []
        for rank, process in self._processes.items():
            if statuses[rank] is None and process.poll() is not None:
                statuses[rank] = process.returncode
                if process.returncode:
                    new.append(rank)
                    self._failed_at[rank] = time.monotonic()
        # The killed ones first: a process that aborts most often does so because of another.
        killed = {rank for rank in new if statuses[rank] in (-signal.SIGKILL, -signal.SIGSEGV)}
        self._outcome.failed += sorted(new, key=lambda rank: (rank not in killed, rank))

    def _restart(self, running: Running) -> None:
        """Restart failed processes that may be, if others run whom they can rejoin."""
        statuses = self._outcome.statuses
        # Once one has finished, the others are about to: there would be nobody to rejoin.
        if None not in statuses or 0 in statuses:
            return
        for rank, at in list(self._failed_at.items()):
            status = statuses[rank]
            if status is not None and time.monotonic() > at + SETTLES:
                del self._failed_at[rank]
                if self._owner.may_restart(rank, status):
                    self._outcome.failed.remove(rank)
                    statuses[rank] = None
                    self._start(running, rank, **{REJOIN: "1"})

    def _ask_to_end(self, running: Running, grace: float) -> None:
        """Give processes time to end by themselves; another signal takes it from them."""
        running.signal(self._outcome.interrupted or signal.SIGTERM)
        before, until = len(self._owner.signals), time.monotonic() + grace
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > until or len(self._owner.signals) > before:
                return
            self._lines.pass_on(_POLL_SECONDS, freely=True)
