"""What the coordinator answers, for as long as it lives."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._elastic.generation import CoordinatorLostError
from jaxcoll._elastic.heartbeat import BEAT_SECONDS

ANSWER_SECONDS = 30.0
"""A coordinator that does not answer for so long, or for as long as a step may take, is lost. JAX
itself ends the process after its heartbeat timeout, which is longer, without asking Python."""


class Answers:
    """Calls that ask a coordinator, and may never return where it has died or is stopped.

    Attributes:
      lost: whether it has died.
      left: threads that wait for it and may never come home.
    """

    def __init__(self, patience: float, when_lost: Callable[[], None]) -> None:
        self.lost = False
        self.left: list[threading.Thread] = []
        self._when_lost = when_lost
        self._asking: set[threading.Event] = set()
        # In beats, so that a process that was stopped in between has not waited.
        self._beats = math.ceil(min(patience, ANSWER_SECONDS) / BEAT_SECONDS)

    def lose(self) -> None:
        """Tell whoever waits that nobody answers any more."""
        self.lost = True
        for told in list(self._asking):
            told.set()
        self._when_lost()

    def check(self) -> None:
        """Refuse to wait for what others say.

        Raises:
          CoordinatorLostError: they cannot say anything any more.
        """
        if self.lost:
            raise CoordinatorLostError

    def to(self, call: Callable[[], Any]) -> Any:
        """`call()`, in a thread of its own.

        Raises:
          CoordinatorLostError: there will be no answer.
        """
        outcome: list[tuple[Any, BaseException | None]] = []
        told = threading.Event()

        def ask() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:
                outcome.append((None, error))
            told.set()

        self.check()
        self._asking.add(told)
        asking = threading.Thread(target=ask, name="jaxcoll-ask", daemon=True)
        asking.start()
        any(self.lost or told.wait(BEAT_SECONDS) for _ in range(self._beats))
        self._asking.discard(told)
        if not outcome:
            self.left.append(asking)
            self.lose()
            raise CoordinatorLostError
        result, error = outcome[0]
        if isinstance(error, StoreUnreachableError):
            self.lose()
            raise CoordinatorLostError from error
        if error is not None:
            raise error
        return result
