"""One measured process: what it offers, and how it serves the requests of the driver."""

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
    """What a library has to offer in order to be measured; all ranks get the same requests."""

    @abc.abstractmethod
    def world(self) -> dict[str, Any]:
        """Number of `devices` and `processes`, `platform`, and `library` with its version."""

    @abc.abstractmethod
    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """Hold the values of a tree, given by its leaves' `shape` and `dtype`, and no other."""

    def compile(self, name: str) -> float | None:
        """Build the program of a contestant from nothing; returns seconds. None: there is none."""
        return None

    @abc.abstractmethod
    def describe(self, name: str) -> dict[str, Any]:
        """Carry it out once: its largest `error`, and what else the library knows about it."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def reset(self, name: str) -> None:  # noqa: B027 most overwrite nothing
        """Bring back what `call` overwrites; not timed."""

    @abc.abstractmethod
    def call(self, name: str) -> None:
        """Carry it out, and wait for its result."""

    def cpu_seconds(self) -> float:
        """User and system time of this process so far, all threads."""
        return time.process_time()

    def time(self, name: str, calls: int) -> dict[str, float]:
        """`seconds` and `cpu_seconds` (all threads) of some calls together.

        All ranks start together, behind a barrier that is not timed.
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
    """Serve requests from standard input; exit at once where the driver closes it or ends.

    A request is a method's name and its arguments; a reply is its value and an error, one of them
    None. The first reply is the world of the rank that `make` returns.
    """
    requests = Connection(os.dup(0), writable=False)
    replies = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what the library prints goes to the log, so it cannot be taken for a reply

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
        os._exit(0)  # an orderly exit may wait for ever for a rank that was killed

    # Apart from the work, since a request may wait for ever for a rank whose driver was killed.
    threading.Thread(target=read, daemon=True).start()
    reply(enter)
    while True:
        method, arguments = waiting.get()
        reply(lambda m=method, a=arguments: getattr(ranks[0], m)(**a))
