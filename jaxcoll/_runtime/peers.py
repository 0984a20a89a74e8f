"""Messages between processes outside their collectives, as keys of the coordination service.

Every process has an inbox there, and a bell, a key that wakes its watchdog when written. The
watchdog replies to every question at once, even while the process computes, sleeps or is stuck in
a collective. So a process that does not reply is dead, stopped or cut off. Messages are JSON.

Four words say that a process is not there. It is *silent* if it does not reply, or its record does
not change; it has *ended* if it said so; it is *lost* if its connection to the coordinator closed
without that, or if the others concluded it; and *late* if a deadline passed without it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcoll._job.key_value import CoordinatorClient, Keys
from jaxcoll._job.liveness import coordinator_connection, list_ended
from jaxcoll._job.timing import (
    COORDINATOR_SECONDS,
    REPLY_SECONDS,
    REPLY_SECONDS_EACH,
    SILENT_WORKER_SECONDS,
)

_NONE: dict[str, Any] = {"name": "", "reported": True, "ended": False, "runs": ()}
"""Stands for the record of a process that has published none."""


def parse_rank(name: str) -> int:
    """Read the process number in a process's name; its other part changes with a restart."""
    return int(name.split(".")[0])


class Peers:
    """The other processes, which this one can reach outside its collectives.

    Each process publishes one record, as JSON: its name; whether the coordinator will report its
    end, which it does not after a restart; the elastic runs that it is in; a number that changes
    with each heartbeat in one; and whether it has ended.
    """

    def __init__(self, store: CoordinatorClient) -> None:
        self.store = store
        self.root = "jaxcoll/watch"  # the folder of all keys
        self.process = store.process
        self.lost: set[int] = set()  # processes known to be lost
        # Processes that have ended, each with the last call that it finished its part of, by
        # process group, if it published that
        self.ended: dict[int, dict[str, int]] = {}
        # Unique, so that a restarted process does not read replies to its predecessor.
        self.name = f"{self.process}.{os.urandom(4).hex()}"
        self.runs: set[str] = set()  # elastic runs that this process is in
        self._sent, self._beats = itertools.count(), 0
        self._publishing = threading.Lock()
        # By process: its record, since when it is the same, and whether it ever changed
        self._seen: dict[int, tuple[dict[str, Any], float, bool]] = {}

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
        folder = f"{self.root}/replies/{self.name}.{next(self._sent)}"
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
        name, text = f"{self.name}.{next(self._sent)}", json.dumps(message)

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
            records = self._read_records()
            left = {p: done for p, done in left.items() if records.get(p, _NONE)["reported"]}
        self.ended = left

    def find_state(self, process: int) -> str:
        """Look up a silent process: "ended", "lost", "here", or "" if it has made no call."""
        record = json.loads(self.store.try_get(self.key("state", process)) or "null") or _NONE
        if record["ended"]:
            return "ended"
        if record["reported"] and process in list_ended():
            return "lost"
        return "here" if record["name"] else ""

    def write_record(self, ended: bool = False) -> str:
        reported = coordinator_connection() is not None
        fields = {"name": self.name, "reported": reported, "ended": ended}
        return json.dumps({**fields, "runs": sorted(self.runs), "beat": self._beats})

    def publish(self) -> None:
        """Publish this process's record, unless a restarted process has taken its place."""
        mine = self.key("state", self.process)
        with self._publishing:  # so that no earlier record overwrites a later one
            present = self.store.try_get(mine) if self._beats else None
            if present is None or json.loads(present)["name"] == self.name:
                self._beats += 1
                self.store.set(mine, self.write_record())

    def observe(self) -> None:
        """Read all records, and note which have changed."""
        now = time.monotonic()
        for process, record in self._read_records().items():
            before, since, changed = self._seen.get(process, (record, now, False))
            same = record == before
            self._seen[process] = record, since if same else now, changed or not same

    def _read_records(self) -> dict[int, dict[str, Any]]:
        texts = self.store.all(f"{self.root}/state")
        return {int(process): json.loads(text) for process, text in texts.items()}

    def has_left(self, name: str, run: str) -> bool:
        """Judge whether a process left a run, by its records so far and the coordinator's news.

        A process is also silent while native code holds its interpreter lock, and then goes on. The
        same may be true of a stopped one, until a deadline passes. So silence counts as an end only
        if no connection would show the end, to this process or of the other.
        """
        process = parse_rank(name)
        record = self._seen.get(process, (_NONE,))[0]
        if record["name"] != name or run not in record["runs"]:
            return True
        if record["reported"] and process in list_ended():
            return True
        would_show = record["reported"] and coordinator_connection() is not None
        return not would_show and self.is_silent(name)

    def is_silent(self, name: str) -> bool:
        since = self._seen.get(parse_rank(name), (_NONE, 0.0))[1]
        return time.monotonic() - since > SILENT_WORKER_SECONDS

    def is_alive(self, name: str, run: str) -> bool:
        return not (self.has_left(name, run) or self.is_silent(name))

    def is_settled(self, name: str, run: str) -> bool:
        # The first record that is seen may be an old one, of a process that has died.
        changed = self._seen.get(parse_rank(name), (_NONE, 0.0, True))[2]
        return changed or self.is_silent(name) or self.has_left(name, run)

    def describe_silence(self, process: int) -> str:
        here = "it is dead, stopped or cut off"
        if coordinator_connection() is not None:
            here = "it is stopped, cut off, or in native code that holds the interpreter lock"
        return {
            "": "has made no call yet",
            "here": f"does not answer: {here}",
            "lost": "has died, or was cut off: its connection to the coordinator has closed",
            "ended": "has ended",
        }[self.find_state(process)]
