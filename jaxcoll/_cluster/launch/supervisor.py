"""One run of a job on this host: its processes from their start to their sure end."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from jaxcoll._cluster.launch.lines import Lines
from jaxcoll._cluster.launch.subprocesses import Running, surely_ended
from jaxcoll._cluster.launchers import REJOIN

GRACE = 5.0
"""Seconds that processes have to end when they are asked to."""

SETTLES = 4.0
"""Seconds after which survivors of a failure have found out whether they can go on."""

_BEAT = 0.05  # seconds between two looks at who has ended


@dataclasses.dataclass
class Outcome:
    """How a job ended.

    Attributes:
      statuses: of each process, as `Ended.status`, before anything was ended here.
      failed: the ranks that failed by themselves, the first one first.
      late: whether the time was up.
      interrupted: the signal by which the job was to end; 0: none.
    """

    statuses: list[int | None]
    failed: list[int] = dataclasses.field(default_factory=list)
    late: bool = False
    interrupted: int = 0


def run_job(
    command: Sequence[str],
    variables: Sequence[Mapping[str, str]],
    say: Callable[[int, str, bytes], None],
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    keep_going: bool = False,
    signals: Sequence[int] = (),
    watched: Callable[[], None] = lambda: None,
    again: Callable[[int, int], bool] = lambda rank, status: False,
    has_room: Callable[[str], bool] = lambda stream: True,
) -> Outcome:
    """Run one process for each set of variables, and end all when one fails.

    Args:
      command: what to run.
      variables: each rank's own environment variables, over this process's.
      say: given the rank, the stream ("out" or "err") and each line as it comes; see `Lines`. It
        must not wait.
      timeout: seconds after which all are ended; None: none.
      grace: seconds between asking them to end, by the signal that was asked for or SIGTERM, and
        killing them.
      keep_going: let the others run when one fails.
      signals: that came so far; the first one ends the job, and a second takes the grace away.
      watched: called now and then.
      again: asked with the rank and status of one that failed, if others run `SETTLES` seconds
        later and none has ended well: whether it is started again, told to `REJOIN` them.
      has_room: given a stream, whether more of it can be passed on; else the processes wait with
        what they print, as they would for any reader.

    Returns:
      How it ended. No process outlives this call.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with surely_ended() as running:
        job = _Job(running, command, variables, Lines(say, has_room))
        outcome = job.outcome
        while None in outcome.statuses:
            job.note_ended()
            outcome.interrupted = signals[0] if signals else 0
            outcome.late = deadline is not None and time.monotonic() > deadline
            failed = outcome.failed and not keep_going
            if failed or outcome.interrupted or (outcome.late and None in outcome.statuses):
                break
            job.lines.pass_on(_BEAT)
            watched()
            job.start_again(again)
        outcome.late = outcome.late and None in outcome.statuses
        job.ask_to_end(outcome.interrupted or signal.SIGTERM, grace, signals)
        job.lines.finish()
    return outcome


class _Job:
    """Processes by their ranks, and what became of them so far.

    Attributes:
      outcome: how it ended, as far as it has.
      lines: what the processes print.
    """

    def __init__(
        self,
        running: Running,
        command: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        lines: Lines,
    ) -> None:
        self._running, self._command, self._variables = running, command, variables
        self.lines = lines
        self.outcome = Outcome([None] * len(variables))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed_at: dict[int, float] = {}
        for rank in range(len(variables)):
            self._start(rank)

    def _start(self, rank: int, **more: str) -> None:
        process = self._running.start(
            self._command, {**self._variables[rank], **more},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.lines.of(rank, process)
        self._processes[rank] = process

    def note_ended(self) -> None:
        """Who has ended since the last look; of those that failed, the killed ones first."""
        statuses, new = self.outcome.statuses, []
        for rank, process in self._processes.items():
            if statuses[rank] is None and process.poll() is not None:
                statuses[rank] = process.returncode
                if process.returncode:
                    new.append(rank)
                    self._failed_at[rank] = time.monotonic()
        # A process that aborts, or ends with an error, most often does so because of another.
        killed = {rank for rank in new if statuses[rank] in (-signal.SIGKILL, -signal.SIGSEGV)}
        self.outcome.failed += sorted(new, key=lambda rank: (rank not in killed, rank))

    def start_again(self, again: Callable[[int, int], bool]) -> None:
        """Start those again that failed and may, if others run whom they can rejoin."""
        statuses = self.outcome.statuses
        if None not in statuses or 0 in statuses:
            return
        for rank, at in list(self._failed_at.items()):
            status = statuses[rank]
            if status is not None and time.monotonic() > at + SETTLES:
                del self._failed_at[rank]
                if again(rank, status):
                    self.outcome.failed.remove(rank)
                    statuses[rank] = None
                    self._start(rank, **{REJOIN: "1"})

    def ask_to_end(self, number: int, grace: float, signals: Sequence[int]) -> None:
        """Give processes time to end by themselves; a second interruption takes it from them."""
        if not grace or not self._run():
            return
        self._running.signal(number)
        before, until = len(signals), time.monotonic() + grace
        while self._run() and time.monotonic() <= until and len(signals) <= before:
            self.lines.pass_on(_BEAT, freely=True)

    def _run(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())
