"""Process groups: the processes that run programs together, and the progress of each."""

from __future__ import annotations

import math
import re
import time
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job.coordinator_process import name_processes
from jaxcoll._job.liveness import coordinator_connection
from jaxcoll._job.stacks import main_place
from jaxcoll._job.threads import Task, Worker
from jaxcoll._job.timing import (
    LATE_COORDINATOR_SECONDS,
    NEWS_SECONDS,
    REPLY_SECONDS,
    RETRY_SECONDS,
)
from jaxcoll._runtime.agreement import Agreement
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.call_order import CallOrder
from jaxcoll._runtime.executable import Program
from jaxcoll._runtime.fingerprint import (
    compile_shared,
    describe_collective,
    describe_exchange,
    digest_arguments,
)
from jaxcoll._runtime.peers import Peers
from jaxcoll.errors import PeerLostError, ProgramMismatchError, ReplicaDivergenceError

_TRANSPORT = re.compile("gloo|connection|peer|nccl|socket|heartbeat|unavailable|timed out", re.I)


class ProcessGroup:
    """The processes of one mesh, including this one.

    Guarantee: all of them run the same programs in the same order. A new program, or one that is
    not expected (see `CallOrder`), runs only after all processes have agreed on it.
    """

    def __init__(self, peers: Peers, processes: tuple[int, ...], name: str = "") -> None:
        self.processes = processes  # their numbers, sorted
        which = f"{processes[0]}-{processes[-1]}-{zlib.crc32(repr(processes).encode()):08x}"
        self.name = name or which
        # Groups have separate connections, so their calls may overlap.
        self.worker = Worker("jaxcoll-worker")
        self.failure: Exception | None = None  # the error that all further calls raise
        self.position = 0  # of the latest call, counted from 1
        self.done = 0  # position of the last call that this process finished its part of
        self._program: Program | None = None  # of the latest call
        self.call: Call | None = None  # the call in progress
        self._agreed = 0  # position of the last call that runs, or has run
        self._started = 0.0  # when the call in progress was agreed on
        self._since = time.monotonic()  # when the latest call began, or ended
        self._failed = 0, ""  # position and error of a call that failed here; others may wait in it
        self._order = CallOrder()
        self._last_folder = ""  # keys of the previous agreement
        self._peers = peers
        self._waiting: set[weakref.ref[Task]] = set()
        self._ended_at_beat: tuple[int, set[int]] = (0, set())  # see `beat`

    @property
    def latest(self) -> tuple[int, str]:
        """The position of the latest call, and its program's digest."""
        return self.position, self._program.digest if self._program else ""

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(p for p in self.processes if p != self._peers.process)

    def begin(self, task: Task) -> None:
        """Abandon a task if the group fails before it is done.

        Raises:
          PeerLostError: a process of the group is already lost.
          ProgramMismatchError: the processes are out of step.
        """
        if self.failure or self._peers.lost or self._peers.ended:
            self._raise_if_lost()
        # A weak reference, because results are large.
        self._waiting.add(weakref.ref(task, self._waiting.discard))

    def _raise_if_lost(self) -> None:
        self._check_failure()
        lost = self._peers.lost.intersection(self.processes)
        if lost := lost or self._find_ended(self.position + 1):
            raise self._make_lost_error(lost, self.position + 1, " was not started")

    def _check_failure(self) -> None:
        if self.failure:
            raise self.failure

    compiled = staticmethod(compile_shared)
    describe = staticmethod(describe_exchange)

    def run(self, call: Call, program: Program, wait: bool = True) -> Any:
        """Call a program together with the other processes, and `wait` for the result.

        Raises:
          ProgramMismatchError: the others call another program.
          PeerLostError: the call failed, and a process has died or no longer answers.
        """
        if self.failure or self._peers.lost or self._peers.ended:
            self._raise_if_lost()
        self.position += 1
        self._started = 0.0
        self.call, self._program, self._since = call, program, time.monotonic()
        is_expected = self._order.follow(program.digest)
        result: Any = None
        try:
            # A new program may have the digest of one that ran, but its first values are new. After
            # a call that failed here, others may still wait for this process's part in that one,
            # and would take this call's data for it.
            has_failed = self._failed[0] == self.position - 1
            if program.is_first or has_failed or not is_expected:
                result = self._agree(call, program)
            self._started = time.monotonic()
            self._agreed = self.position  # set first: others ask while this process waits below
            if call.program is not None:
                result = program.compiled(*call.args, **call.kwargs)
                if wait:
                    jax.block_until_ready(result)
            self.done = self.position  # published when this process ends, so that nobody misses it
            return result
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # Gloo raises ValueError
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._failed = self.position, lines[-1][:300]  # a callback's error is in the last line
            raise self.explain(error) from error
        finally:
            self.call, self._since = None, time.monotonic()

    def _agree(self, call: Call, program: Program) -> dict[int, Any]:
        """Wait until all processes are about to run this program, or raise the reason why not.

        Returns:
          The value of each process, if the call has no program.
        """
        first = digest_arguments(call) if program.is_first and call.program is not None else None
        where = self._peers, self.name, self.processes, self.position
        warn, check = call.same_rows.append, self._check_failure
        agreement = Agreement(*where, program, first, warn, call.value, check)
        try:
            values = agreement.reach()
            if self._peers.process == self.processes[0]:
                if self._last_folder:  # all have arrived here, so they have read the last verdict
                    self._peers.store.delete(self._last_folder)
                self._last_folder = agreement.folder
            program.is_first = False
            return values
        except (ProgramMismatchError, ReplicaDivergenceError) as error:
            disagreement = error
        except StoreUnreachableError as error:
            disagreement = PeerLostError(
                f"The processes could not agree on call {self.position}, {program.name}: {error}",
            )
        except PeerLostError as error:
            disagreement = self._report_lost(error.ranks, str(error))
        self._order.interrupt()
        if agreement.is_run:
            self.end(disagreement)  # every process raises this error from now on
            self._alarm(disagreement)
        raise disagreement

    def explain(self, error: Exception) -> Exception:
        """Turn a transport's error into a PeerLostError if a process is lost, or return it."""
        if self.failure:  # others noticed first, and shut down the transport
            return self.failure
        # A callback of the program may fail, too, while all processes are well.
        if not _TRANSPORT.search(str(error)):
            return error
        try:
            lost = self._peers.lost.intersection(self.processes) or self._find_silent()
        except StoreUnreachableError as unknown:
            return PeerLostError(
                f"Call {self.position}, {self._name}, failed, and it is not known who is lost: "
                f"{unknown} The transport reported: {str(error).splitlines()[0]}",
            )
        if not lost:
            late, who = self._find_late()
            if late:
                error.add_note(who)
            return error
        return self._report_lost(lost, f"the transport reported: {str(error).splitlines()[0]}")

    @property
    def _name(self) -> str:
        return self._program.name if self._program else "nothing"

    def _find_ended(self, position: int) -> set[int]:
        """Find the processes that ended before they did their part of the call at `position`."""
        ended = self._peers.ended
        return {p for p in self.processes if p in ended and ended[p].get(self.name, 0) < position}

    def _report_lost(self, lost: Iterable[int], why: str) -> PeerLostError:
        """Make the error that names lost processes, and send it to all others."""
        failure = self._make_lost_error(lost, self.position, f", {self._name}, failed", why)
        if not self._peers.lost.issuperset(lost):
            self._peers.lost.update(lost)
            self._alarm(failure, lost=sorted(lost))
        return failure

    def _make_lost_error(
        self, lost: Iterable[int], position: int, how: str, why: str = ""
    ) -> PeerLostError:
        who = "; ".join(f"process {p} {self._peers.describe_silence(p)}" for p in sorted(lost))
        source = why and f" Noticed because {why}"
        return PeerLostError(
            f"Call {position} among {len(self.processes)} processes{how}: {who}. The surviving "
            f"processes can go on over a mesh of their own devices.{source}",
            ranks=sorted(lost),
        )

    def _find_silent(self) -> set[int]:
        """Find the processes that ended, by the coordinator's reports, or else the silent ones.

        After a transport error there is at least one. If several are silent, or no coordinator
        reports ends, ask again: a process may hold the interpreter lock for a while.
        """
        peers, silent = self._peers, set(self.others)
        time.sleep(NEWS_SECONDS)  # so that processes that died together are named together
        for patience in (REPLY_SECONDS, RETRY_SECONDS):
            peers.look()
            if lost := self._find_ended(self.position):
                return lost
            silent -= peers.ended.keys()  # these had done their part
            silent -= set(peers.ask(self.name, self.position, sorted(silent), patience))
            if not silent or (len(silent) == 1 and coordinator_connection() is None):
                break
        return silent

    def _alarm(self, failure: Exception, **more: Any) -> None:
        # As text and numbers, because processes never unpickle messages.
        alarm = {"error": type(failure).__name__, "text": str(failure), **more}
        self._peers.alarm(self.name, [p for p in self.others if p not in self._peers.lost], alarm)

    def end(self, failure: Exception) -> None:
        """Make all calls in this process raise this error from now on, those in progress too."""
        self.failure = self.failure or failure
        self._interrupt(self.failure)

    def deadline(self, call: Call, begun: float) -> float:
        """Say when a call with a `meeting_seconds` is late, or when to ask again."""
        seconds = call.timeout_seconds or math.inf
        if self.call is call and self._started:
            return self._started + seconds
        # Processes still agree on its program, and its own time may begin at any moment.
        return min(begun + (call.meeting_seconds or 0.0), time.monotonic() + seconds)

    def _interrupt(self, error: Exception) -> None:
        for reference in list(self._waiting):
            if (task := reference()) and not task.is_done():
                task.abandon(error)

    def receive_alarm(self, alarm: dict[str, Any]) -> None:
        """Raise, in the calls that wait here, a failure that another process found."""
        if alarm["error"] == "PeerLostError":
            failure = PeerLostError(alarm["text"], ranks=alarm["lost"])
        else:
            failure = self.failure = self.failure or ProgramMismatchError(alarm["text"])
        self._interrupt(failure)

    def status(self, position: int, lines: bool = False) -> dict[str, Any]:
        """Answer a process at `position` with this one's progress, and its program if `lines`."""
        status = {
            "at": self.position,
            "name": self._name,
            "inside": self.call is not None,
            "seconds": time.monotonic() - self._since,
            "failed": self._failed[1] if self._failed[0] == position else "",
            "ran": self._order.ran(position) if position <= self._agreed else None,
            "place": main_place(),
        }
        if lines and self._program is not None and self.position == position:
            status["lines"] = self._program.lines
        return status

    def describe_late(self, call: Call, program: Program) -> tuple[tuple[int, ...], str]:
        """Find the processes that keep a call from finishing, and describe them."""
        if self.call is not call:
            return (), (
                " It has not started: an earlier call over the same processes, which was given up, "
                "has not finished yet."
            )
        late, text = self._find_late()
        return late, f" {text} {describe_collective(program)}"

    def _find_late(self) -> tuple[tuple[int, ...], str]:
        position = self.position
        try:
            soon = LATE_COORDINATOR_SECONDS
            replies = self._peers.ask(self.name, position, self.others, coordinator=soon)
            states = {p: self._peers.describe_silence(p) for p in self.others if p not in replies}
        except (StoreUnreachableError, RuntimeError) as error:
            return (), f"It is not known who did not arrive: {error}"
        states |= {
            p: describe_status(reply) for p, reply in replies.items() if reply["at"] < position
        }
        what = "did not arrive" if states else "failed in it"
        # Report lateness first: it may be the cause of another process's transport error.
        states = states or {
            p: f"raised {reply['failed']}" for p, reply in replies.items() if reply.get("failed")
        }
        if not states:
            return (), "All processes have arrived: the call is slow, or its transport is stuck."
        late = sorted(states)
        who = f"{name_processes(late).capitalize()} of {len(self.processes)} {what}"
        details = "; ".join(f"process {p} {states[p]}" for p in late)
        return tuple(late), f"{who}: {details}."

    def beat(self) -> None:
        """Give up waiting in a call for processes that were already over at the previous heartbeat.

        A call gets one more heartbeat, because it may need only this process's part to finish.
        """
        ended = self.position, self._find_ended(self.position)
        if ended[1] and ended == self._ended_at_beat:
            self._interrupt(self._report_lost(ended[1], "the coordinator reported it"))
        self._ended_at_beat = ended


def describe_status(status: dict[str, Any]) -> str:
    """Describe where a process is that has not arrived."""
    if not status["at"]:
        return "has made no call over these devices"
    if status["inside"]:
        text = f"has been in call {status['at']}, {status['name']}, for {status['seconds']:.1f} s"
    else:
        text = f"has not been in any call for {status['seconds']:.1f} s, since call {status['at']}"
    return f"{text} ({status['place']})" if status["place"] else text
