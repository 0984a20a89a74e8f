"""Process groups: the processes that run programs together, and how far each of them is."""

from __future__ import annotations

import re
import time
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import REPLY_SECONDS, RETRY_SECONDS
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._dispatch.agreement import Agreement
from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.call_order import CallOrder
from jaxcoll._dispatch.executable import Program
from jaxcoll._dispatch.fingerprint import first_values, shared_program, starts_with
from jaxcoll._dispatch.peers import Peers
from jaxcoll._threads import Task
from jaxcoll.errors import PeerLostError, ProgramMismatchError

NEWS_SECONDS = 0.05
"""Seconds after a transport's error until the coordinator's news of the dead has come."""

_TRANSPORT = re.compile("gloo|connection|peer|nccl|socket|heartbeat|unavailable|timed out", re.I)


class ProcessGroup:
    """The processes of one mesh, this one among them.

    Guarantees: all of them run the same programs in the same order. A program that is new, or not
    the one that is expected (see `CallOrder`), runs once all processes have agreed on it.
    """

    def __init__(self, peers: Peers, processes: tuple[int, ...]) -> None:
        self.processes = processes  # their numbers, sorted
        self.name = f"{processes[0]}-{processes[-1]}-{zlib.crc32(repr(processes).encode()):08x}"
        self.failure: Exception | None = None  # the error that all calls raise from now on
        self.position = 0  # of the call that was entered last, counted from 1
        self.done = 0  # the last call of which this process has done its part
        self._program: Program | None = None  # of the call that was entered last
        self.call: Call | None = None  # the one that was entered and has not ended
        self._agreed = 0  # the last call that is known to run, or has run
        self._since = time.monotonic()  # when the last call was entered, or ended
        self._failed = 0, ""  # a call in which others may wait, and why it failed here
        self._order = CallOrder()
        self._last_folder = ""  # where processes agreed before
        self._peers = peers
        self._waiting: set[weakref.ref[Task]] = set()
        self._missed: tuple[int, set[int]] = (0, set())

    @property
    def others(self) -> tuple[int, ...]:
        """The processes but this one."""
        return tuple(p for p in self.processes if p != self._peers.process)

    def begin(self, task: Task) -> None:
        """Have a task abandoned if the group fails before it is done.

        Raises:
          PeerLostError: a process of the group is lost already.
          ProgramMismatchError: the processes are out of step.
        """
        self._check()
        # It is not kept: results are large.
        self._waiting.add(weakref.ref(task, self._waiting.discard))

    def _check(self) -> None:
        if not (self.failure or self._peers.lost or self._peers.gone):
            return
        if self.failure:
            raise self.failure
        lost = self._peers.lost.intersection(self.processes)
        if lost := lost or self._gone_before(self.position + 1):
            raise self._loss(lost, self.position + 1, " was not begun")

    compiled = staticmethod(shared_program)

    def run(self, call: Call, program: Program, wait: bool = True) -> Any:
        """Make a call of a program together with the others, and `wait` for the result.

        Raises:
          ProgramMismatchError: they call another one.
          PeerLostError: the call failed, and somebody has died, or does not answer any more.
        """
        self._check()
        self.position += 1
        self.call, self._program, self._since = call, program, time.monotonic()
        is_expected = self._order.follow(program.mark)
        try:
            # A program made anew may have the mark of one that ran, and gets other values.
            if program.is_first or not is_expected:
                self._agree(call, program)
            self._agreed = self.position  # first: others ask while this process waits below
            result = program.compiled(*call.args, **call.kwargs)
            if wait:
                jax.block_until_ready(result)
            self.done = self.position  # a process that ends publishes it, and is not missed there
            return result
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # Gloo's errors are the latter
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._failed = self.position, lines[-1][:300]  # of a callback's error the last line
            raise self.explained(error) from error
        finally:
            self.call, self._since = None, time.monotonic()

    def _agree(self, call: Call, program: Program) -> None:
        """Wait until all processes are about to run this program, or raise what is wrong."""
        first = first_values(call) if program.is_first else None
        where = self._peers, self.name, self.processes, self.position
        agreement = Agreement(*where, program, first, call.same_rows.append)
        disagreement, is_run = None, False
        try:
            disagreement, is_run = agreement.reach()
            if disagreement is None and self._peers.process == self.processes[0]:
                if self._last_folder:  # all are here, and so have read the verdict before this one
                    self._peers.store.delete(self._last_folder)
                self._last_folder = agreement.folder
        except StoreUnreachableError as error:
            disagreement = PeerLostError(
                f"Call {self.position}, {program.name}, could not be agreed upon: the process of "
                f"the coordination service is dead or cut off. What was seen: {error}",
            )
        except PeerLostError as error:
            disagreement = self._lost(error.ranks, str(error))
        if disagreement is not None:
            self._order.interrupt()
            if is_run:
                self._fail(disagreement)
            raise disagreement
        program.is_first = False

    def explained(self, error: Exception) -> Exception:
        """A transport's error as the loss of a process, if one is lost; else the error itself."""
        if self.failure:  # others noticed first, and broke the transport
            return self.failure
        if not _TRANSPORT.search(str(error)):
            return error
        try:
            lost = self._peers.lost.intersection(self.processes) or self._silent_processes()
        except StoreUnreachableError as unknown:
            return PeerLostError(
                f"Call {self.position}, {self._name}, failed, and nobody can be asked who is "
                f"lost: {unknown} The transport reported: {str(error).splitlines()[0]}",
            )
        if not lost:
            return error
        return self._lost(lost, f"the transport reported: {str(error).splitlines()[0]}")

    @property
    def _name(self) -> str:
        return self._program.name if self._program else "nothing"

    def _gone_before(self, position: int) -> set[int]:
        """Processes that ended without their part of this call, as far as they published it."""
        if not (gone := self._peers.gone):  # as a rule
            return set()
        done = {p: gone[p].get(self.name, 0) for p in self.processes if p in gone}
        return {p for p in done if done[p] < position}

    def _lost(self, lost: Iterable[int], why: str) -> PeerLostError:
        """The error that names lost processes; all others get it, too."""
        failure = self._loss(lost, self.position, f", {self._name}, failed", why)
        if not self._peers.lost.issuperset(lost):
            self._peers.lost.update(lost)
            self._alarm(failure, lost=sorted(lost))
        return failure

    def _loss(self, lost: Iterable[int], position: int, how: str, why: str = "") -> PeerLostError:
        who = "; ".join(f"process {p} {self._peers.silence(p)}" for p in sorted(lost))
        seen = why and f" What was seen: {why}"
        return PeerLostError(
            f"Call {position} among {len(self.processes)} processes{how}: {who}. Those that live "
            f"can go on over a mesh of their own devices.{seen}",
            ranks=sorted(lost),
        )

    def _silent_processes(self) -> set[int]:
        """Processes that have ended, as the coordinator knows; or else those that do not reply.

        After an error that is one at least. Where it seems to be more, or where the coordinator
        knows of no end, they get a second chance: an interpreter may be held for a while.
        """
        peers, silent = self._peers, set(self.others)
        time.sleep(NEWS_SECONDS)  # so that all who died together are named together
        for patience in (REPLY_SECONDS, RETRY_SECONDS):
            peers.look()
            if dead := self._gone_before(self.position):
                return dead
            silent -= peers.gone.keys()  # these did their part
            silent -= set(peers.ask(self.name, self.position, sorted(silent), patience))
            if not silent or (len(silent) == 1 and followed() is None):
                break
        return silent

    def _alarm(self, failure: Exception, **more: Any) -> None:
        # In words and numbers: what processes exchange is never unpickled.
        alarm = {"error": type(failure).__name__, "text": str(failure), **more}
        self._peers.alarm(self.name, [p for p in self.others if p not in self._peers.lost], alarm)

    def _fail(self, failure: Exception) -> None:
        """Have every process of the group raise this, from now on."""
        self.failure = self.failure or failure
        self._interrupt(self.failure)
        self._alarm(failure)

    def _interrupt(self, error: Exception) -> None:
        """End all waits for calls of this group."""
        for reference in list(self._waiting):
            if (task := reference()) and not task.done():
                task.abandon(error)

    def alarmed(self, alarm: dict[str, Any]) -> None:
        """Another process found a failure."""
        if alarm["error"] == "PeerLostError":
            failure = PeerLostError(alarm["text"], ranks=alarm["lost"])
        else:
            failure = self.failure = self.failure or ProgramMismatchError(alarm["text"])
        self._interrupt(failure)

    def status(self, position: int, lines: bool = False) -> dict[str, Any]:
        """Return where this process is, for one at `position`; `lines`: its program there, too."""
        status = {
            "at": self.position,
            "name": self._name,
            "inside": self.call is not None,
            "seconds": time.monotonic() - self._since,
            "failed": self._failed[1] if self._failed[0] == position else "",
            "ran": self._order.ran(position) if position <= self._agreed else None,
        }
        if lines and self._program is not None and self.position == position:
            status["lines"] = self._program.lines
        return status

    def absence(self, call: Call, program: Program) -> tuple[tuple[int, ...], str]:
        """Return which processes keep a call from its end, and the same in words."""
        if self.call is not call:
            return (), (
                " It has not begun: an earlier call over the same processes, which was given up, "
                "has not ended yet."
            )
        late, words = self._late()
        return late, f" {words} {starts_with(program)}"

    def _late(self) -> tuple[tuple[int, ...], str]:
        position = self.position
        try:
            replies = self._peers.ask(self.name, position, self.others, coordinator=0.2)
            words = {p: self._peers.silence(p) for p in self.others if p not in replies}
        except (StoreUnreachableError, RuntimeError) as error:
            return (), f"Who did not arrive is not known: {error}"
        words |= {p: in_words(reply) for p, reply in replies.items() if reply["at"] < position}
        what = "did not arrive" if words else "failed in it"
        # A transport's error on one process may follow from another's absence, which comes first.
        words = words or {
            p: f"has {reply['failed']}" for p, reply in replies.items() if reply.get("failed")
        }
        if not words:
            return (), "All processes have arrived: the call is slow, or its transport is stuck."
        late = sorted(words)
        who = f"Process{'es' * (len(late) > 1)} {', '.join(map(str, late))}"
        each = "; ".join(f"process {p} {words[p]}" for p in late)
        return tuple(late), f"{who} of {len(self.processes)} {what}: {each}."

    def beat(self) -> None:
        """Stop waiting in a call for processes that ended, and since the last heartbeat at least.

        The rest of the call may be this process's own part, which takes less than a heartbeat.
        """
        missed = self.position, self._gone_before(self.position)
        if missed[1] and missed == self._missed:
            self._interrupt(self._lost(missed[1], "the coordinator reported it"))
        self._missed = missed


def in_words(status: dict[str, Any]) -> str:
    """Describe where a process is that is not where it is expected."""
    if not status["at"]:
        return "has made no call over these devices"
    if status["inside"]:
        return f"is in call {status['at']}, {status['name']}, for {status['seconds']:.1f} s"
    return f"has been outside of any call for {status['seconds']:.1f} s, since call {status['at']}"
