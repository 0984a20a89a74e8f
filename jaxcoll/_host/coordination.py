"""What processes ask one another beside their collectives: one thread each, which listens.

Every process has a bell at the coordination service. Its watch sleeps until somebody rings, which
costs nothing, and answers at once, whatever the process itself is doing: computing, asleep, or
stuck in a collective. So one that does not answer is dead, stopped or cut off. Messages are JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jaxcoll._compat_coordination import Store, StoreUnreachableError, store

BEAT_SECONDS = 1.0
"""How often a process that computes tells how far it is."""

ANSWER_SECONDS = 0.75
"""How long an answer is waited for; it takes a few milliseconds."""

_SLACK_SECONDS, _EACH_SECONDS = 0.2, 0.02  # for the coordinator itself, and for each that is asked


class Member(Protocol):
    """What a watch speaks for."""

    def whereabouts(self, position: int) -> dict[str, Any]:
        """What is answered to one who is at `position`."""
        ...

    def alarmed(self, alarm: dict[str, Any]) -> None:
        """Somebody found what concerns all."""
        ...

    def beat(self, watch: Watch) -> None:
        """A beat has passed."""
        ...


class Watch:
    """The bell of this process, and the thread that answers it.

    Attributes:
      store: keys and values of the world.
      root: the folder in it under which everything stands.
      members: what it speaks for, by name.
      lost: processes that are known to be lost.
    """

    def __init__(self, store: Store, generation: str) -> None:
        self.store = store
        self.root = f"jaxcoll/{generation}"
        self.process = store.process
        self.members: dict[str, Member] = {}
        self.teams: dict[tuple[int, ...], Any] = {}
        self.lost: set[int] = set()
        self._asked = itertools.count()
        self._heard = store.increment(f"{self.root}/rung/{self.process}", 0)
        store.set(f"{self.root}/here/{self.process}", "1")
        self._thread = threading.Thread(target=self._listen, name="jaxcoll-watch", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Stop listening: a thread that waits in the client while Python ends takes it down."""
        atexit.unregister(self.end)
        with contextlib.suppress(StoreUnreachableError, RuntimeError):
            self.store.set(f"{self.root}/ended/{self.process}", "1")
            self._ring(self.process, {"end": True})
        self._thread.join(2 * BEAT_SECONDS)

    def roll_call(
        self, member: str, position: int, processes: Iterable[int], patience: float = ANSWER_SECONDS
    ) -> dict[int, dict[str, Any]]:
        """Ask processes where they are.

        Args:
          member: of which member of theirs.
          position: where this process is.
          processes: whom to ask.
          patience: seconds that all answers together are waited for.

        Returns:
          The answers; of a process that does not answer there is none.

        Raises:
          StoreUnreachableError: nobody can be asked.
        """
        # Where this process is cut off from the coordinator, no message to it ends.
        asked = list(processes)
        asking = _Asking(lambda: self._answers(member, position, asked, patience))
        asking.join(patience + _SLACK_SECONDS + _EACH_SECONDS * len(asked))
        return asking.result()

    def _answers(
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

    def known(self, process: int) -> str:
        """What a process that does not answer has said of itself: "" (nothing), "here", "ended"."""
        for word in ("ended", "here"):
            if self.store.try_get(f"{self.root}/{word}/{process}"):
                return word
        return ""

    def silent(self, process: int) -> str:
        """The same in words."""
        return {
            "": "has made no call yet",
            "here": "does not answer: it is dead, stopped or cut off",
            "ended": "has ended",
        }[self.known(process)]

    def _ring(self, process: int, message: dict[str, Any]) -> None:
        rung = self.store.increment(f"{self.root}/rung/{process}")
        self.store.set(f"{self.root}/bell/{process}/{rung}", json.dumps(message))

    def _listen(self) -> None:
        beaten = time.monotonic()
        with contextlib.suppress(StoreUnreachableError, RuntimeError):  # it ends with the client
            while True:
                key = f"{self.root}/bell/{self.process}/{self._heard + 1}"
                with contextlib.suppress(TimeoutError):
                    message = json.loads(self.store.get(key, BEAT_SECONDS))
                    self._heard += 1
                    self.store.delete(key)
                    if message.get("end"):
                        return
                    self._hear(message)
                if time.monotonic() - beaten >= BEAT_SECONDS:
                    beaten = time.monotonic()
                    for member in list(self.members.values()):
                        member.beat(self)

    def _hear(self, message: dict[str, Any]) -> None:
        member = self.members.get(message["member"])
        if "alarm" in message:
            self.lost.update(message["alarm"].get("lost", ()))
            if member:
                member.alarmed(message["alarm"])
        else:
            answer = member.whereabouts(message["position"]) if member else {"at": 0}
            self.store.set(f"{message['ask']}/{self.process}", json.dumps(answer))


class _Asking(threading.Thread):
    """A question that may never come back."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(name="jaxcoll-asking", daemon=True)
        self._ask = ask
        self._outcome: list[tuple[Any, BaseException | None]] = []
        self.start()

    def run(self) -> None:
        try:
            self._outcome.append((self._ask(), None))
        except BaseException as error:
            self._outcome.append((None, error))

    def result(self) -> Any:
        """What came back.

        Raises:
          StoreUnreachableError: nothing has.
        """
        if not self._outcome:
            raise StoreUnreachableError("the coordinator does not answer.")
        answer, error = self._outcome[0]
        if error is not None:
            raise error
        return answer


_watch: Watch | None = None
_generation = "0"
_lock = threading.Lock()


def watch() -> Watch | None:
    """The watch of this process, which begins when it is first asked for; None: it is alone."""
    global _watch
    found = store()
    if found is None:
        return None
    with _lock:
        if _watch is None or not _watch.store.is_of(found):
            _watch = Watch(found, _generation)
        return _watch


def begin_generation(name: str) -> None:
    """Forget what was counted and agreed upon so far: every process of the next world calls this.

    Args:
      name: what no generation before it was called, the same on all its processes.
    """
    global _watch, _generation
    with _lock:
        old, _watch, _generation = _watch, None, name
    if old is not None:
        old.end()
