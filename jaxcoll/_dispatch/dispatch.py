"""The one place where the host calls programs: with others, in time, and in order."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._dispatch.corruption_log import listening
from jaxcoll._dispatch.executable import Program, compiled_for
from jaxcoll._dispatch.process_group import Team, team_of
from jaxcoll._errors import DeadlineExceededError
from jaxcoll._threads import abandon

Devices = Sequence[jax.Device]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a program by all processes of a team."""

    team: Team
    program: Program
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Make it, in a worker's thread, and wait for its result if the job waits."""
        job = getattr(_worked, "on", None)
        if job is None:
            return self.team.run(self.program, self.args, self.kwargs)
        job.team, job.program, job.position = self.team, self.program, self.team.position + 1
        with self.team.waited_for(job):
            return self.team.run(self.program, self.args, self.kwargs, job.wait)


def prepared(
    program: Any,
    timeout_seconds: float | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    across: Devices = (),
    told: str = "",
    rows: bool = False,
) -> Callable[[], Any]:
    """A call of a jitted program, ready for `finished`.

    With a deadline it will run in another thread, so it is compiled here: a trace belongs to the
    thread whose JAX configuration it was asked for under. With other processes it is compiled
    here, too, because they compare what was compiled.

    Args:
      program: what `jax.jit` returned.
      timeout_seconds: as in `finished`.
      args: placed.
      kwargs: placed.
      across: the devices of its mesh; others' processes run it, too.
      told: options that processes have to have in common.
      rows: whether arrays that are split are a batch, of which each process has its own.
    """
    kwargs = dict(kwargs or {})
    team = team_of(across)
    if team is None and not timeout_seconds:
        return functools.partial(program, *args, **kwargs)
    known = compiled_for(program, args, kwargs, told, shared=team is not None, rows=rows)
    if team is None:
        return functools.partial(known.compiled, *args, **kwargs)
    return Call(team, known, args, kwargs)


class _Job:
    """One call in the hands of a worker: it settles once, by whatever comes first.

    It is waited for with a bare lock, whose hand-over takes half the time of an event's.

    Attributes:
      call: makes it.
      wait: whether its result is waited for.
      is_alone: whether no other process takes part.
      team, program, position: what it has begun, if it has.
    """

    def __init__(
        self, worker: _Worker, call: Callable[[], Any], wait: bool, is_alone: bool
    ) -> None:
        self.worker, self.call, self.wait, self.is_alone = worker, call, wait, is_alone
        self.result: Any = None
        self.error: BaseException | None = None
        self.team: Team | None = None
        self.program: Program | None = None
        self.position = 0
        self._settling, self._open = threading.Lock(), threading.Lock()
        self._open.acquire()

    def settle(self, error: BaseException | None, result: Any = None) -> None:
        if self._settling.acquire(blocking=False):
            self.error, self.result = error, result
            self._open.release()

    def settled(self, timeout_seconds: float | None) -> bool:
        """Wait; whether it has settled by then."""
        bound = min(timeout_seconds, threading.TIMEOUT_MAX) if timeout_seconds else -1
        return self._open.acquire(timeout=bound)

    def give_up(self, error: Exception) -> None:
        """Have whoever waits for it raise this, and leave it to its worker."""
        abandon(self.worker)  # pyright: ignore
        self.settle(error)

    def outcome(self) -> tuple[BaseException | None, Any]:
        """Make the call."""
        try:
            result = self.call()
            if self.wait and not isinstance(self.call, Call):  # which has waited
                jax.block_until_ready(result)
            return None, result
        except BaseException as error:
            return error, None


class _Worker:
    """A thread that makes one call after another.

    A call that is given up stays in its hands to the end, and what is called next begins after
    it, because two programs at once would take each other's messages.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        threading.Thread(target=self._work, name="jaxcoll-worker", daemon=True).start()

    def is_alive(self) -> bool:
        """Whether it still has a call that somebody gave up."""
        return self._pending > 0

    def take(self, job: _Job) -> None:
        with self._lock:
            self._pending += 1
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = _worked.on = self._jobs.get()
            outcome = job.outcome()
            with self._lock:
                self._pending -= 1
            _worked.on = None
            # The last that is done: whoever waits would wake only to wait for the interpreter.
            job.settle(*outcome)
            del job, outcome


_worked = threading.local()
_workers: dict[str, _Worker] = {}
"""By the name of the team, "" for calls within this process: other teams' messages are others."""


def finished(
    call: Callable[[], Any],
    timeout_seconds: float | None,
    what: str,
    *,
    across: Devices = (),
    checksum: bool = False,
) -> Any:
    """`call()`, waited for to the end if there is a deadline, or a checksum, or Gloo below it.

    The call itself is made in a thread, because a backend may run a program while it
    dispatches it, as XLA's CPU does with small ones; and over several processes always, so that
    news of another's failure ends the wait.

    Args:
      call: dispatches compiled programs and traces nothing; see `prepared`.
      timeout_seconds: seconds; None and 0 mean no deadline.
      what: what is named in the message.
      across: the devices of the mesh, as for `prepared`.
      checksum: whether to listen for corrupted reductions over these devices.

    Returns:
      What `call` returns.

    Raises:
      PeerLostError: another process has died, or was cut off.
      ProgramMismatchError: processes call different programs.
      DeadlineExceededError: it took longer; it names the processes that did not arrive. The wait
        is given up, not the program: it ends when it can, and the process stays usable. What is
        called next over the same processes begins after that.
      ReductionCorruptedError: a reduction was corrupted.
    """
    if checksum:
        call = functools.partial(listening, call, what, across)
    team = call.team if isinstance(call, Call) else team_of(across)
    name = team.name if team else ""
    worker = _workers.get(name)
    if team is not None:
        team.check()
    if team is None and not timeout_seconds and not (worker and worker.is_alive()):
        return call()
    if worker is None:
        worker = _workers[name] = _Worker()
    # What fails over Gloo may never be ready, so that whoever waited for it elsewhere would hang.
    over_gloo = team is not None and across[0].platform == "cpu"
    job = _Job(worker, call, bool(timeout_seconds) or over_gloo, is_alone=team is None)
    if team is None:
        return _outcome(job, timeout_seconds, what)
    with team.waited_for(job):
        return _outcome(job, timeout_seconds, what)


def _outcome(job: _Job, timeout_seconds: float | None, what: str) -> Any:
    """What becomes of a job in its worker's hands."""
    job.worker.take(job)
    try:
        in_time = job.settled(timeout_seconds)
    except BaseException:  # Ctrl-C, say
        abandon(job.worker)  # pyright: ignore
        raise
    if not in_time:
        abandon(job.worker)  # pyright: ignore
        said, ranks = _late(job)
        said = f"{what} did not finish within {timeout_seconds:g} s.{said}"
        raise DeadlineExceededError(said, ranks=ranks)
    if job.error is not None:
        raise job.error
    return job.result


def _late(job: _Job) -> tuple[str, tuple[int, ...]]:
    """Why a call is late, in words, and the processes that did not arrive."""
    if job.is_alone:
        return "", ()
    if job.team is None or job.program is None:
        return (
            " It has not begun: an earlier call over the same processes, which was given up, has "
            "not ended yet."
        ), ()
    ranks, who = job.team.arrivals(job.position)
    return f" {who} {job.program.starts_with}", ranks
