"""Messages between processes beside their collectives, over the coordination service's keys.

Every process has an inbox there. Its watchdog replies to every question at once, whatever the
process is doing: computing, asleep, or stuck in a collective. So a process that does not reply is
dead, stopped or cut off. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxcoll._cluster.liveness import ended, followed
from jaxcoll._cluster.timing import COORDINATOR_SECONDS, REPLY_SECONDS
from jaxcoll._compat.coordination import Store, StoreUnreachableError
from jaxcoll._threads import within

_EACH_SECONDS = 0.02  # more for each process that is asked


class Peers:
    """The other processes, as this one can reach them beside its collectives.

    Attributes:
      store: the coordination service's keys and values.
      root: the folder in it under which everything stands.
      process: this one.
      lost: processes that are known to be lost.
      gone: processes that have ended, each with the last call of which it had done its part, by
        process group, if it published that.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.root = "jaxcoll/watch"
        self.process = store.process
        self.lost: set[int] = set()
        self.gone: dict[int, dict[str, int]] = {}
        self._questions = itertools.count()

    def ask(
        self,
        group: str,
        position: int,
        processes: Iterable[int],
        patience: float = REPLY_SECONDS,
        coordinator: float = COORDINATOR_SECONDS,
    ) -> dict[int, dict[str, Any]]:
        """Ask processes where they are.

        Args:
          group: in the calls of which process group.
          position: where this process is.
          processes: whom to ask.
          patience: seconds that all replies together are waited for.
          coordinator: seconds beside, after which a coordinator that does not answer is given up.

        Returns:
          The replies; there is none of a process that does not answer.

        Raises:
          StoreUnreachableError: nobody can be asked.
        """
        asked = list(processes)
        question = functools.partial(self._replies, group, position, asked, patience)
        return bounded(question, patience + coordinator + _EACH_SECONDS * len(asked))

    def _replies(
        self, group: str, position: int, asked: Sequence[int], patience: float
    ) -> dict[int, dict[str, Any]]:
        folder = f"{self.root}/replies/{self.process}.{next(self._questions)}"
        for process in asked:
            self.send(process, {"ask": folder, "group": group, "position": position})
        replies = {}
        until = time.monotonic() + patience
        for process in asked:
            with contextlib.suppress(TimeoutError):
                left = max(until - time.monotonic(), 0.01)
                replies[process] = json.loads(self.store.get(f"{folder}/{process}", left))
        self.store.delete(folder)
        return replies

    def alarm(self, group: str, processes: Iterable[int], alarm: dict[str, Any]) -> None:
        """Tell processes what this one has found; those that do not listen are not waited for."""
        for process in processes:
            if process != self.process:
                self.send(process, {"alarm": alarm, "group": group})

    def send(self, process: int, message: dict[str, Any]) -> None:
        """Put a message into the inbox of a process."""
        number = self.store.increment(f"{self.root}/sent/{process}")
        self.store.set(f"{self.root}/inbox/{process}/{number}", json.dumps(message))

    def look(self) -> None:
        """Take note of the processes that have ended."""
        self.gone = ended()

    def known(self, process: int) -> str:
        """What is known of a process that does not answer: "ended", "dead", "here"; "": nothing."""
        if self.store.try_get(f"{self.root}/ended/{process}"):
            return "ended"
        if process in ended():
            return "dead"
        return "here" if self.store.try_get(f"{self.root}/here/{process}") else ""

    def silence(self, process: int) -> str:
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


def bounded(call: Callable[[], Any], seconds: float) -> Any:
    """`call()`, which asks the coordinator; StoreUnreachableError: that did not answer in time."""
    try:
        return within(seconds, call)
    except TimeoutError as error:
        raise StoreUnreachableError(f"the coordinator is stopped or cut off: {error}.") from None
