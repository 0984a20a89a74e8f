"""Process groups: the processes that run programs together, and how far each of them is."""

from __future__ import annotations

import json
import re
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import REPLY_SECONDS, RETRY_SECONDS
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._dispatch.call_history import (
    CallHistory,
    CallPredictor,
    Entered,
    disordered,
    in_words,
)
from jaxcoll._dispatch.executable import Program
from jaxcoll._dispatch.peers import Peers
from jaxcoll._dispatch.program_check import ProgramCheck
from jaxcoll._errors import PeerLostError, ProgramMismatchError
from jaxcoll._threads import Task

NEWS_SECONDS = 0.05
"""How much later than a transport's error the coordinator's news of all who died may come."""

_TRANSPORT = re.compile("gloo|connection|peer|nccl|socket|heartbeat|unavailable|timed out", re.I)


class ProcessGroup:
    """The processes of one mesh, this one among them.

    Law: all of them run the same programs in the same order. A program that follows on another as
    it never did before (see `CallPredictor`) is agreed upon before any of its data moves; all else
    is compared after the fact, twice a second, by neighbours.
    """

    def __init__(self, peers: Peers, processes: tuple[int, ...]) -> None:
        self.processes = processes  # their numbers, sorted
        self.name = f"{processes[0]}-{processes[-1]}-{zlib.crc32(repr(processes).encode()):08x}"
        self.failure: Exception | None = None  # the error that all calls raise from now on
        self.done = 0  # the last call of which this process has done its part
        self._peers = peers
        self._waiting: set[weakref.ref[Task]] = set()
        self.history = CallHistory()
        self._predictor = CallPredictor()
        self._check = ProgramCheck(peers, self.name, processes)
        self._published = 0
        self._missed: tuple[int, set[int]] = (0, set())

    @property
    def others(self) -> tuple[int, ...]:
        """The processes but this one."""
        return tuple(p for p in self.processes if p != self._peers.process)

    @property
    def position(self) -> int:
        """Of the call that was entered last."""
        return self.history.last.position

    def check(self) -> None:
        """Refuse to begin anything with processes that are lost or out of step."""
        if self.failure:
            raise self.failure
        lost = self._peers.lost.intersection(self.processes)
        if lost := lost or self._gone_before(self.position + 1):
            raise self._loss(lost, "it was known before this call, which was not begun")

    def register(self, task: Task) -> None:
        """Have a task abandoned if the group fails before it is settled."""
        # It is not kept: results are large.
        self._waiting.add(weakref.ref(task, self._waiting.discard))

    def _interrupt(self, error: Exception) -> None:
        """End all waits for calls of this group."""
        for known in list(self._waiting):
            if (task := known()) and not task.is_settled:
                task.abandon(error)

    def run(
        self, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], wait: bool = True
    ) -> Any:
        """Call a program together with the others, and `wait` for the result.

        Raises:
          ProgramMismatchError: they call another one.
          PeerLostError: the call failed, and somebody has died, or does not answer any more.
        """
        self.check()
        call = self.history.enter(program)
        try:
            unexpected = self._predictor.is_unexpected(call.mark)
            # A program made anew may have the mark of one that ran, and gets other values.
            if unexpected or program.uncompared:
                self._agree(program, call)
            self._predictor.follow(call.mark, unexpected)
            self.history.agreed = call  # before it runs: others ask while this process waits in it
            result = program.compiled(*args, **kwargs)
            if wait:
                jax.block_until_ready(result)
            self.done = call.position  # a process that ends publishes it, and is not missed there
            return result
        except StoreUnreachableError as error:
            raise PeerLostError(
                f"Call {call.position}, {call.name}, could not be agreed upon: the process of the "
                f"coordination service is dead or cut off. What was seen: {error}",
            ) from error
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # Gloo's errors are the latter
            if self.history.agreed is call:
                self.history.fail(call, error)
            raise self.explained(error) from error
        finally:
            self.history.leave()

    def _agree(self, program: Program, call: Entered) -> None:
        try:
            disagreement = self._check.disagreement(program, call)
        except PeerLostError as error:
            raise self._lost(error.ranks, str(error)) from None
        if disagreement is None:
            return
        error, nobody_ran = disagreement
        if not nobody_ran:
            self._fail(error)
        self.history.take_back()
        self._predictor.interrupt()
        raise error

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
                f"Call {self.position}, {self.history.last.name}, failed, and nobody can be asked "
                f"who is lost: {unknown} The transport reported: {str(error).splitlines()[0]}",
            )
        if not lost:
            return error
        return self._lost(lost, f"the transport reported: {str(error).splitlines()[0]}")

    def _gone_before(self, position: int) -> set[int]:
        """Processes that ended without their part of this call, as far as they published it."""
        if not (gone := self._peers.gone):  # as a rule
            return set()
        known = ((p, gone[p].get(self.name, 0)) for p in self.processes if p in gone)
        return {p for p, done in known if done < position}

    def _lost(self, lost: Iterable[int], why: str) -> PeerLostError:
        """The error that names lost processes; all others get it, too."""
        failure = self._loss(lost, why)
        if not self._peers.lost.issuperset(lost):
            self._peers.lost.update(lost)
            self._alarm(failure, {"lost": sorted(lost)})
        return failure

    def _loss(self, lost: Iterable[int], why: str) -> PeerLostError:
        who = "; ".join(f"process {p} {self._peers.silence(p)}" for p in sorted(lost))
        return PeerLostError(
            f"Call {self.position} among {len(self.processes)} processes, "
            f"{self.history.last.name}, failed: {who}. Those that live can go on over a mesh of "
            f"their own devices. What was seen: {why}",
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

    def _alarm(self, failure: Exception, more: dict[str, Any]) -> None:
        # In words and numbers: what processes exchange is never unpickled.
        alarm = {"error": type(failure).__name__, "text": str(failure), **more}
        self._peers.alarm(self.name, [p for p in self.others if p not in self._peers.lost], alarm)

    def _fail(self, failure: Exception) -> None:
        """Have every process of the group raise this, from now on."""
        self.failure = self.failure or failure
        self._interrupt(self.failure)
        self._alarm(failure, {})

    def alarmed(self, alarm: dict[str, Any]) -> None:
        """Another process found a failure."""
        if alarm["error"] == "PeerLostError":
            failure = PeerLostError(alarm["text"], ranks=alarm["lost"])
        else:
            failure = self.failure = self.failure or ProgramMismatchError(alarm["text"])
        self._interrupt(failure)

    def arrivals(self, position: int) -> tuple[tuple[int, ...], str]:
        """Which processes have not come as far as `position`, and the same in words."""
        try:
            replies = self._peers.ask(self.name, position, self.others, coordinator=0.2)
            words = {p: self._peers.silence(p) for p in self.others if p not in replies}
        except (StoreUnreachableError, RuntimeError) as error:
            return (), f"Who did not arrive is not known: {error}"
        words |= {p: in_words(a) for p, a in replies.items() if a["at"] < position}
        what = "did not arrive" if words else "failed in it"
        # A transport's error on one process may follow from another's absence, which comes first.
        words = words or {p: f"has {a['failed']}" for p, a in replies.items() if a.get("failed")}
        if not words:
            return (), "All processes have arrived: the call is slow, or its transport is stuck."
        late = sorted(words)
        who = f"Process{'es' * (len(late) > 1)} {', '.join(map(str, late))}"
        each = "; ".join(f"process {p} {words[p]}" for p in late)
        return tuple(late), f"{who} of {len(self.processes)} {what}: {each}."

    def confirm(self) -> None:
        """Ask all others now for what a heartbeat compares with one."""
        now, here = self.history.agreed, self._peers.process
        replies = self._peers.ask(self.name, now.position, self.others)
        for process, reply in sorted(replies.items()):
            if reply.get("digest") not in (None, now.digest):
                called = f"{now.name} on process {here} and {reply['then']} on process {process}"
                if reply["mark"] == now.mark:
                    called = "the same there, and something before it was not"
                failure = disordered(f"call {now.position} was {called}")
                self._fail(failure)
                raise failure

    def beat(self) -> None:
        """Publish how far this process is, compare with the next one, and see who has ended."""
        self._end_vain_wait()
        published, here = self.history.published(), self._peers.process
        store, folder = self._peers.store, f"{self._peers.root}/order/{self.name}"
        if published["at"] != self._published:
            self._published = published["at"]
            store.set(f"{folder}/{here}", json.dumps(published))
        elif not self.history.is_inside:
            return
        # One neighbour each is enough: if any two orders differ, so do those of two neighbours.
        there = self.processes[(self.processes.index(here) + 1) % len(self.processes)]
        text = store.try_get(f"{folder}/{there}")
        if text and not self.failure:
            if difference := self.history.difference(here, there, json.loads(text)):
                self._fail(disordered(difference))

    def _end_vain_wait(self) -> None:
        """Stop waiting in a call for processes that ended, and since the last heartbeat at least.

        The rest of the call may be this process's own part, which takes less than a heartbeat.
        """
        missed = self.position, self._gone_before(self.position)
        if missed[1] and missed == self._missed:
            self._interrupt(self._lost(missed[1], "the coordinator reported it"))
        self._missed = missed
