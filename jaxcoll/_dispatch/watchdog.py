"""What processes ask one another beside their collectives: one thread each, which listens.

Every process has a bell at the coordination service. Its watch sleeps until somebody rings, which
costs nothing, and answers at once, whatever the process itself is doing: computing, asleep, or
stuck in a collective. So one that does not answer is dead, stopped or cut off. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jaxcoll._cluster.coordinator import message
from jaxcoll._cluster.coordinator_proxy import give_up_coordinator
from jaxcoll._cluster.liveness import ended, followed
from jaxcoll._compat.coordination import Store, StoreUnreachableError, store
from jaxcoll._threads import at_exit, not_at_exit, within

BEAT_SECONDS = 1.0
"""How often a process that computes tells how far it is."""

ANSWER_SECONDS = 0.75
"""How long an answer is waited for; it takes a few milliseconds."""

COORDINATOR_SECONDS = 10.0
"""How much longer the coordinator may take to pass questions and answers on, before it is lost."""

_EACH_SECONDS = 0.02  # more for each process that is asked


class Member(Protocol):
    """What a watch speaks for."""

    def whereabouts(self, position: int) -> dict[str, Any]:
        """What is answered to one who is at `position`."""
        ...

    def alarmed(self, alarm: dict[str, Any]) -> None:
        """Somebody found what concerns all."""
        ...

    @property
    def done(self) -> int:
        """The last call of which this process has done its part."""
        ...

    def beat(self, watch: Watch) -> None:
        """A beat has passed."""
        ...

    def confirm(self) -> None:
        """Raise if what was done so far is wrong."""
        ...


class Watch:
    """The bell of this process, and the thread that answers it.

    Attributes:
      store: keys and values of the world.
      root: the folder in it under which everything stands.
      members: what it speaks for, by name.
      lost: processes that are known to be lost.
      gone: processes that have ended, each with the last calls of which it had done its part, by
        member, if it told.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.root = "jaxcoll/watch"
        self.process = store.process
        self.members: dict[str, Member] = {}
        self.teams: dict[tuple[int, ...], Any] = {}
        self.lost: set[int] = set()
        self.gone: dict[int, dict[str, int]] = {}
        self._ended = False
        self._asked = itertools.count()
        self._heard = store.increment(f"{self.root}/rung/{self.process}", 0)
        store.set(f"{self.root}/here/{self.process}", "1")
        self._thread = threading.Thread(target=self._listen, name="jaxcoll-watch", daemon=True)
        self._thread.start()
        at_exit(self.end)

    def end(self) -> None:
        """Stop listening: a thread that waits in the client while Python ends takes it down."""
        not_at_exit(self.end)
        self._ended = True
        if line := followed():
            line.say_farewell({name: member.done for name, member in self.members.items()})
        try:
            if store() is not None:  # None: it has died, and it was given up
                _answered(self._say_farewell, 2 * BEAT_SECONDS)
        except StoreUnreachableError:  # JAX's own farewell would wait for minutes
            give_up_coordinator()
        except RuntimeError:
            pass
        self._thread.join(2 * BEAT_SECONDS)

    def _say_farewell(self) -> None:
        self.store.set(f"{self.root}/ended/{self.process}", "1")
        self._ring(self.process, {"end": True})

    def roll_call(
        self,
        member: str,
        position: int,
        processes: Iterable[int],
        patience: float = ANSWER_SECONDS,
        coordinator: float = COORDINATOR_SECONDS,
    ) -> dict[int, dict[str, Any]]:
        """Ask processes where they are.

        Args:
          member: of which member of theirs.
          position: where this process is.
          processes: whom to ask.
          patience: seconds that all answers together are waited for.
          coordinator: seconds beside, after which a coordinator that says nothing is given up.

        Returns:
          The answers; of a process that does not answer there is none.

        Raises:
          StoreUnreachableError: nobody can be asked.
        """
        asked = list(processes)
        ask = functools.partial(self._called, member, position, asked, patience)
        return _answered(ask, patience + coordinator + _EACH_SECONDS * len(asked))

    def _called(
        self, member: str, position: int, asked: Sequence[int], patience: float
    ) -> dict[int, dict[str, Any]]:
        folder = f"{self.root}/answers/{self.process}.{next(self._asked)}"
        for process in asked:
            self._ring(process, {"ask": folder, "member": member, "position": position})
        answers = {}
        until = time.monotonic() + patience
        for process in asked:
            with contextlib.suppress(TimeoutError):
                left = max(until - time.monotonic(), 0.01)
                answers[process] = json.loads(self.store.get(f"{folder}/{process}", left))
        self.store.delete(folder)
        return answers

    def alarm(self, member: str, processes: Iterable[int], alarm: dict[str, Any]) -> None:
        """Tell processes what this one has found; those that do not listen are not waited for."""
        for process in processes:
            if process != self.process:
                self._ring(process, {"alarm": alarm, "member": member})

    def look(self) -> None:
        """Take note of who has ended."""
        self.gone = ended()

    def known(self, process: int) -> str:
        """What is known of a process that does not answer: "ended", "dead", "here"; "": nothing."""
        if self.store.try_get(f"{self.root}/ended/{process}"):
            return "ended"
        if process in ended():
            return "dead"
        return "here" if self.store.try_get(f"{self.root}/here/{process}") else ""

    def silent(self, process: int) -> str:
        """The same in words."""
        here = "it is dead, stopped or cut off"
        if followed() is not None:
            here = "it is stopped, cut off, or in foreign code that holds Python's interpreter"
        return {
            "": "has made no call yet",
            "here": f"does not answer: {here}",
            "dead": "has died, or was cut off: its connection to the coordinator has ended",
            "ended": "has ended",
        }[self.known(process)]

    def _ring(self, process: int, message: dict[str, Any]) -> None:
        rung = self.store.increment(f"{self.root}/rung/{process}")
        self.store.set(f"{self.root}/bell/{process}/{rung}", json.dumps(message))

    def _listen(self) -> None:
        beaten = time.monotonic()
        with contextlib.suppress(StoreUnreachableError, RuntimeError):  # it ends with the client
            while not self._ended:
                key = f"{self.root}/bell/{self.process}/{self._heard + 1}"
                with contextlib.suppress(TimeoutError):
                    rung = message(self.store.get(key, BEAT_SECONDS))
                    self._heard += 1
                    self.store.delete(key)
                    if rung.get("end"):
                        return
                    with contextlib.suppress(KeyError, TypeError):  # whoever wrote it is not known
                        self._hear(rung)
                if time.monotonic() - beaten >= BEAT_SECONDS:
                    beaten = time.monotonic()
                    self.look()
                    for member in list(self.members.values()):
                        member.beat(self)
        until = time.monotonic() + COORDINATOR_SECONDS
        while store() is not None and not self._ended and time.monotonic() < until:
            time.sleep(0.02)  # JAX forgets a client after it has shut it down
        if not self._ended and store() is None:
            self._let_go()

    def _let_go(self) -> None:
        """Forget a client that `jax.distributed.shutdown` has ended: it lives while it is known."""
        global _watch
        not_at_exit(self.end)
        if line := followed():
            line.say_farewell({name: member.done for name, member in self.members.items()})
        with _lock:
            if _watch is self:
                _watch = None

    def _hear(self, rung: dict[str, Any]) -> None:
        member = self.members.get(rung["member"])
        if "alarm" in rung:
            self.lost.update(rung["alarm"].get("lost", ()))
            if member:
                member.alarmed(rung["alarm"])
        else:
            answer = member.whereabouts(rung["position"]) if member else {"at": 0}
            self.store.set(f"{rung['ask']}/{self.process}", json.dumps(answer))


def _answered(call: Callable[[], Any], seconds: float) -> Any:
    """`call()`, which asks the coordinator: from one that is stopped nothing comes.

    Raises:
      StoreUnreachableError: it has not answered for so long.
    """
    try:
        return within(seconds, call)
    except TimeoutError as error:
        raise StoreUnreachableError(f"the coordinator is stopped or cut off: {error}.") from None


_watch: Watch | None = None
_lock = threading.Lock()


def watch() -> Watch | None:
    """The watch of this process, which begins when it is first asked for; None: it is alone."""
    global _watch
    found = store()
    if found is None:
        return None
    with _lock:
        if _watch is None or not _watch.store.is_of(found):
            _watch = Watch(found)
        return _watch


def confirm() -> None:
    """Ask the processes that answer whether they ran the same programs as this one.

    Raises:
      ProgramMismatchError: they were not, so that results are wrong.
    """
    if _watch is not None:
        with contextlib.suppress(StoreUnreachableError):
            for member in list(_watch.members.values()):
                member.confirm()
