"""Processes that run programs together, and how far each of them is."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax

from jaxcoll._cluster.liveness import followed
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._dispatch.call_predictor import Order
from jaxcoll._dispatch.call_status import Calls, Entered, disordered, where
from jaxcoll._dispatch.first_values import uncompared
from jaxcoll._dispatch.program_check import agreed
from jaxcoll._dispatch.watchdog import ANSWER_SECONDS, Watch, watch
from jaxcoll._errors import PeerLostError, ProgramMismatchError

OUT_OF_BREATH_SECONDS = 3.0
"""How long those who do not answer are waited for once more, where one of them may be alive."""

NEWS_SECONDS = 0.05
"""How much later than a transport's error the coordinator's news may come, of all who died."""


class Wait(Protocol):
    """Somebody who waits for a call."""

    def give_up(self, error: Exception) -> None:
        """Wait no longer, and raise this."""
        ...


class Team:
    """The processes of one mesh, this one among them.

    Law: all of them run the same programs in the same order. What follows on another program as it
    never did before (see `Order`) is agreed upon before any of its data moves; all else is compared
    after the fact, about once a second, by neighbours.

    Attributes:
      processes: their numbers, sorted.
      name: short for them.
      failure: the error that all calls raise from now on.
      done: the last call of which this process has done its part.
      agreement: what processes have written to agree upon a program, the last time.
    """

    def __init__(self, watch: Watch, processes: tuple[int, ...]) -> None:
        self.processes = processes
        self.name = f"{processes[0]}-{processes[-1]}-{zlib.crc32(repr(processes).encode()):08x}"
        self.failure: Exception | None = None
        self._waits: list[Wait] = []
        self._watch = watch
        self._calls = Calls()
        self._order = Order()
        self._told = 0
        self.done = 0
        self.agreement = ""
        self._missed: tuple[int, set[int]] = (0, set())

    @property
    def others(self) -> tuple[int, ...]:
        """The processes but this one."""
        return tuple(p for p in self.processes if p != self._watch.process)

    @property
    def last(self) -> Entered:
        """The call that was entered last."""
        return self._calls.last

    @property
    def position(self) -> int:
        """Of the call that was entered last."""
        return self.last.position

    def check(self) -> None:
        """Refuse to begin anything with processes that are lost or out of step.

        Raises:
          PeerLostError: some are lost.
          ProgramMismatchError: they are out of step.
        """
        if self.failure:
            raise self.failure
        lost = self._watch.lost.intersection(self.processes)
        if lost := lost or self._gone_before(self.position + 1):
            raise self._loss(lost, "it was known before this call, which was not begun")

    @contextlib.contextmanager
    def waited_for(self, wait: Wait) -> Iterator[None]:
        """In here `wait` is given up when the team fails."""
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def interrupt(self, error: Exception) -> None:
        """End all waits for calls of this team."""
        for wait in list(self._waits):
            wait.give_up(error)

    def run(
        self, program: Any, args: Sequence[Any], kwargs: dict[str, Any], wait: bool = True
    ) -> Any:
        """Call a `Program` together with the others.

        Args:
          program: the program.
          args: its arguments.
          kwargs: likewise.
          wait: for the result.

        Raises:
          ProgramMismatchError: they call another one.
          PeerLostError: the call failed, and somebody has died, or does not answer any more.
        """
        self.check()
        call = self._calls.enter(program)
        try:
            asked = self._order.asks(call.mark)
            # A program made anew may have the mark of one that ran, and is given other values.
            if asked or uncompared(program):
                self._agree(program, call)
            self._order.follow(call.mark, asked)
            self._calls.agreed = call
            result = program.compiled(*args, **kwargs)
            if wait:
                jax.block_until_ready(result)
            self.done = call.position
            return result
        except StoreUnreachableError as error:
            raise PeerLostError(
                f"Call {call.position}, {call.name}, could not be agreed upon: the process of the "
                f"coordination service is dead or cut off. What was seen: {error}",
                ranks=(),
            ) from error
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # of Gloo it is the latter
            raise self.explained(error) from error
        finally:
            self._calls.leave()

    def _agree(self, program: Any, call: Entered) -> None:
        try:
            complaint = agreed(self._watch, self, program, call)
        except PeerLostError as error:
            raise self.lost(error.ranks, str(error)) from None
        if complaint is None:
            return
        said, untouched = complaint
        if not untouched:
            self.fail(ProgramMismatchError(str(said)))
        self._calls.take_back()
        self._order.interrupt()
        raise said if isinstance(said, Exception) else ProgramMismatchError(said)

    def explained(self, error: Exception) -> Exception:
        """A transport's error as the loss of a process, if one is lost; else the error itself."""
        if self.failure:  # the transport only tells that others have noticed first
            return self.failure
        if not _TRANSPORT.search(str(error)):
            return error
        try:
            lost = self._watch.lost.intersection(self.processes) or self._unanswered()
        except StoreUnreachableError as unknown:
            return PeerLostError(
                f"Call {self.position}, {self.last.name}, failed, and nobody can be asked who is "
                f"lost: {unknown} The transport said: {str(error).splitlines()[0]}",
                ranks=(),
            )
        if not lost:
            return error
        return self.lost(lost, f"the transport said: {str(error).splitlines()[0]}")

    def _gone_before(self, position: int) -> set[int]:
        """Who has ended without its part of this call, as far as it told."""
        gone = self._watch.gone.items()  # as a rule there are none
        return {p for p, done in gone if p in self.processes and done.get(self.name, 0) < position}

    def lost(self, lost: Iterable[int], why: str) -> PeerLostError:
        """The error that names lost processes, of which all others are told."""
        failure = self._loss(lost, why)
        if not self._watch.lost.issuperset(lost):
            self._watch.lost.update(lost)
            self._tell(failure, {"lost": sorted(lost)})
        return failure

    def _loss(self, lost: Iterable[int], why: str) -> PeerLostError:
        who = "; ".join(f"process {p} {self._watch.silent(p)}" for p in sorted(lost))
        return PeerLostError(
            f"Call {self.position} among {len(self.processes)} processes, {self.last.name}, "
            f"failed: {who}. Those that live can go on over a mesh of their own devices. What was "
            f"seen: {why}",
            ranks=sorted(lost),
        )

    def _unanswered(self) -> set[int]:
        """Who has ended, as the coordinator tells; or else who does not answer.

        That is one at least after an error. Where it seems to be more, or where the coordinator
        tells of no end, they get a second chance: an interpreter may be held for a while.
        """
        silent = set(self.others)
        time.sleep(NEWS_SECONDS)
        for patience in (ANSWER_SECONDS, OUT_OF_BREATH_SECONDS):
            self._watch.look()
            if dead := self._gone_before(self.position):
                return dead
            silent -= self._watch.gone.keys()  # these did their part
            at = self.position
            silent -= set(self._watch.roll_call(self.name, at, sorted(silent), patience))
            if not silent or (len(silent) == 1 and followed() is None):
                break
        return silent

    def _tell(self, failure: Exception, more: dict[str, Any]) -> None:
        alarm = {"error": type(failure).__name__, "text": str(failure), **more}
        self._watch.alarm(self.name, [p for p in self.others if p not in self._watch.lost], alarm)

    def fail(self, failure: ProgramMismatchError) -> None:
        """Have every process of the team raise this, from now on."""
        self.failure = self.failure or failure
        self.interrupt(self.failure)
        self._tell(failure, {})

    def alarmed(self, alarm: dict[str, Any]) -> None:
        """Another process told of a failure."""
        if alarm["error"] == "PeerLostError":
            failure = PeerLostError(alarm["text"], ranks=alarm["lost"])
        else:
            failure = self.failure = self.failure or ProgramMismatchError(alarm["text"])
        self.interrupt(failure)

    def arrivals(self, position: int) -> tuple[tuple[int, ...], str]:
        """Which processes have not come as far as `position`, and the same in words."""
        try:
            answers = self._watch.roll_call(self.name, position, self.others, coordinator=0.2)
            words = {p: self._watch.silent(p) for p in self.others if p not in answers}
        except (StoreUnreachableError, RuntimeError) as error:
            return (), f"Who did not arrive is not known: {error}"
        words |= {p: where(a) for p, a in answers.items() if a["at"] < position}
        if not words:
            return (), "All processes have arrived: the call is slow, or its transport is stuck."
        late = sorted(words)
        who = f"Process{'es' * (len(late) > 1)} {', '.join(map(str, late))}"
        told = "; ".join(f"process {p} {words[p]}" for p in late)
        return tuple(late), f"{who} of {len(self.processes)} did not arrive: {told}."

    def whereabouts(self, position: int) -> dict[str, Any]:
        """Where this process is, for one who is at `position`."""
        return self._calls.whereabouts(position)

    def confirm(self) -> None:
        """Ask all others now for what a beat compares with one.

        Raises:
          ProgramMismatchError: they called other programs.
        """
        if self.failure:
            raise self.failure
        now, here = self._calls.agreed, self._watch.process
        answers = self._watch.roll_call(self.name, now.position, self.others)
        for process, answer in sorted(answers.items()):
            if answer.get("digest") not in (None, now.digest):
                called = f"{now.name} on process {here} and {answer['then']} on process {process}"
                if answer["mark"] == now.mark:
                    called = "the same there, and something before it was not"
                failure = disordered(f"call {now.position} was {called}")
                self.fail(failure)
                raise failure

    def beat(self, watch: Watch) -> None:
        """Tell how far this process is, compare with the next one, and see who has ended."""
        self._end_vain_wait()
        shown, here = self._calls.shown(), watch.process
        folder = f"{watch.root}/order/{self.name}"
        if shown["at"] != self._told:
            self._told = shown["at"]
            watch.store.set(f"{folder}/{here}", json.dumps(shown))
        elif not self._calls.is_inside:
            return
        there = self.processes[(self.processes.index(here) + 1) % len(self.processes)]
        text = watch.store.try_get(f"{folder}/{there}")
        if text and not self.failure:
            if said := self._calls.difference(here, there, json.loads(text)):
                self.fail(disordered(said))

    def _end_vain_wait(self) -> None:
        """Wait no more in a call for who has ended, and since the last beat at least.

        It may be that only its own part of the call is left to this process.
        """
        missed = self.position, self._gone_before(self.position)
        if missed[1] and missed == self._missed:
            self.interrupt(self.lost(missed[1], "the coordinator told of it"))
        self._missed = missed


_TRANSPORT = re.compile("gloo|connection|peer|nccl|socket|heartbeat|unavailable|timed out", re.I)


@functools.lru_cache(maxsize=256)
def _processes(devices: tuple[jax.Device, ...]) -> tuple[int, ...]:
    return tuple(sorted({d.process_index for d in devices}))


def team_of(devices: Sequence[jax.Device]) -> Team | None:
    """The team of a mesh's devices; None: they are all in this process."""
    if jax.process_count() == 1:
        return None
    processes = _processes(tuple(devices))
    here = watch() if len(processes) > 1 else None
    if here is None:
        return None
    found = here.teams.get(processes)
    if found is None:
        found = here.teams[processes] = Team(here, processes)
        here.members[found.name] = found
    return found
