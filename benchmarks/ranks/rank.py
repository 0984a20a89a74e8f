"""A measured process: its interface, and the loop that serves the driver's requests."""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Rank(abc.ABC):
    """Interface of a library that can be measured; all ranks get the same requests."""

    @abc.abstractmethod
    def world(self) -> dict[str, Any]:
        """Return the number of `devices` and `processes`, `device`, and `library` with version."""

    @abc.abstractmethod
    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """Create the values of a tree from its leaves' `shape` and `dtype`; drop any other tree."""

    def compile(self, name: str) -> float | None:
        """Compile a contestant's program; returns seconds, or None if nothing is compiled."""
        return None

    @abc.abstractmethod
    def describe(self, name: str) -> dict[str, Any]:
        """Run it once; returns its largest `error`, and other figures of the library."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def reset(self, name: str) -> None:  # noqa: B027 most overwrite nothing
        """Restore the values that `call` overwrites; not timed."""

    @abc.abstractmethod
    def call(self, name: str) -> None:
        """Run it, and wait for its result."""

    def cpu_seconds(self) -> float:
        """Return user and system time of this process so far, over all threads."""
        return time.process_time()

    def time(self, name: str, calls: int) -> dict[str, float]:
        """Return the total `seconds` and `cpu_seconds` (all threads) of some calls.

        All ranks start together, after a barrier that is not timed.
        """
        wall = cpu = 0.0
        self.barrier()
        for _ in range(calls):
            self.reset(name)
            cpu -= time.process_time()
            wall -= time.perf_counter()
            self.call(name)
            wall += time.perf_counter()
            cpu += time.process_time()
        return {"seconds": wall, "cpu_seconds": cpu}


def serve(make: Callable[[], Rank]) -> None:
    """Serve requests from standard input; exit at once if the driver closes it or ends.

    A request is a method's name and its arguments; a reply is its value and an error, one of them
    None. The first reply is the `world` of the rank that `make` returns.
    """
    requests = Connection(os.dup(0), writable=False)
    replies = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # the library's output goes to the log, so it cannot be read as a reply

    def reply(work: Callable[[], Any]) -> None:
        try:
            replies.send((work(), None))
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            replies.send((None, f"{type(error).__name__}: {words[0]}"))

    ranks: list[Rank] = []

    def enter() -> dict[str, Any]:
        ranks.append(make())
        return ranks[0].world()

    waiting: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                waiting.put(requests.recv())
        os._exit(0)  # a normal exit may wait forever for a rank that was killed

    # In its own thread, because a request may wait forever for a killed rank.
    threading.Thread(target=read, daemon=True).start()
    reply(enter)
    while True:
        method, arguments = waiting.get()
        reply(lambda m=method, a=arguments: getattr(ranks[0], m)(**a))
