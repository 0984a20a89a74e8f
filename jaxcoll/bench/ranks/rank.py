"""One process of a team that is measured: it carries out what the driver asks, a line each."""

from __future__ import annotations

import abc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Rank(abc.ABC):
    """What a library has to offer in order to be measured; all ranks are asked the same."""

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
        """Carry it out once: its largest `error`, and what the library can tell about it."""

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
        """Time some calls, which start on all ranks together.

        Args:
          name: of the contestant.
          calls: how many.

        Returns:
          `seconds` on the wall, and `cpu_seconds` (user and system, all threads), each for all
          calls together.
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
    """Answer the driver until it closes the pipe, then leave without ceremony.

    The first answer is the world. What the library prints goes to the log, so that it cannot
    be taken for an answer.

    Args:
      make: joins the other ranks.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(work: Callable[[], Any]) -> None:
        try:
            line = {"value": work()}
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            line = {"error": f"{type(error).__name__}: {words[0]}"}
        print(json.dumps(line), file=answers, flush=True)

    made: list[Rank] = []

    def join() -> dict[str, Any]:
        made.append(make())
        return made[0].world()

    answer(join)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answer(lambda what=what, arguments=arguments: getattr(made[0], what)(**arguments))
    os._exit(0)  # a rank that takes leave politely may wait for ever for one that was killed
