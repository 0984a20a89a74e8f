"""Messages between processes outside their collectives, as keys of the coordination service.

Every process has an inbox there, and a bell, a key that wakes its watchdog when written. The
watchdog replies to every question at once, even while the process computes, sleeps or is stuck in
a collective. So a process that does not reply is dead, stopped or cut off. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcoll._job.key_value import CoordinatorClient, Keys
from jaxcoll._job.liveness import coordinator_connection, list_ended
from jaxcoll._job.timing import COORDINATOR_SECONDS, REPLY_SECONDS, REPLY_SECONDS_EACH

UNREPORTED = "here, unreported"
"""The state of a process whose end the coordinator will not report, as after a restart."""


class Peers:
    """The other processes, which this one can reach outside its collectives."""

    def __init__(self, store: CoordinatorClient) -> None:
        self.store = store
        self.root = "jaxcoll/watch"  # the folder of all keys
        self.process = store.process
        self.lost: set[int] = set()  # processes known to be lost
        # Processes that have ended, each with the last call that it finished its part of, by
        # process group, if it published that
        self.ended: dict[int, dict[str, int]] = {}
        # Unique, so that a restarted process does not read replies to its predecessor.
        self._name = f"{self.process}.{os.urandom(4).hex()}"
        self._sent = itertools.count()

    def ask(
        self,
        group: str,
        position: int,
        processes: Iterable[int],
        patience: float = REPLY_SECONDS,
        coordinator: float = COORDINATOR_SECONDS,
        lines: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """Ask processes where they are in a group's calls, and return the replies that came.

        `patience` is the timeout for all replies together. A coordinator that does not answer for
        `coordinator` seconds more raises StoreUnreachableError. `lines`: see `ProcessGroup.status`.
        """
        processes = list(processes)
        coordinator += REPLY_SECONDS_EACH * len(processes)
        folder = f"{self.root}/replies/{self._name}.{next(self._sent)}"
        question = {"to": group, "ask": folder, "position": position, "lines": lines}
        self._send(processes, question, coordinator)
        replies = {}
        until = time.monotonic() + patience
        for process in processes:
            with contextlib.suppress(TimeoutError):
                left = max(until - time.monotonic(), 0.01)
                replies[process] = json.loads(self.store.get(f"{folder}/{process}", left))
        self.store.request(lambda keys: keys.delete(folder), coordinator)
        return replies

    def alarm(self, to: str, processes: Iterable[int], alarm: dict[str, Any]) -> None:
        """Send an alarm to a process group, or an elastic run, on other processes.

        This does not wait until they have read it.
        """
        others = [process for process in processes if process != self.process]
        self._send(others, {"to": to, "alarm": alarm})

    def _send(
        self, processes: Sequence[int], message: dict[str, Any], seconds: float = math.inf
    ) -> None:
        """Put a message into the inboxes of processes, and then ring their bells."""
        name, text = f"{self._name}.{next(self._sent)}", json.dumps(message)

        def send(keys: Keys) -> None:
            for process in processes:
                keys.set(f"{self.key('inbox', process)}/{name}", text)
                keys.set(self.key("bell", process), "1")

        self.store.request(send, seconds)

    def key(self, what: str, process: int) -> str:
        return f"{self.root}/{what}/{process}"

    def look(self) -> None:
        """Update `ended`, the processes that have ended."""
        left = list_ended()
        if left:
            states = self.store.all(f"{self.root}/state")
            left = {p: done for p, done in left.items() if states.get(str(p)) != UNREPORTED}
        self.ended = left

    def find_state(self, process: int) -> str:
        """Look up a silent process: "ended", "lost", "here", or "" if it has made no call."""
        state = self.store.try_get(self.key("state", process)) or ""
        if state == UNREPORTED:
            return "here"
        return "lost" if state != "ended" and process in list_ended() else state

    def describe_silence(self, process: int) -> str:
        """Describe the state of a silent process for messages."""
        here = "it is dead, stopped or cut off"
        if coordinator_connection() is not None:
            here = "it is stopped, cut off, or in native code that holds the interpreter lock"
        return {
            "": "has made no call yet",
            "here": f"does not answer: {here}",
            "lost": "has died, or was cut off: its connection to the coordinator has closed",
            "ended": "has ended",
        }[self.find_state(process)]
