"""What the coordinator answers, for as long as it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jaxcoll._compat_coordination import StoreUnreachableError
from jaxcoll._host.decision import CoordinatorLostError


class Answers:
    """Calls that ask a coordinator, and would never return where it has died in between.

    Attributes:
      lost: whether it has died.
      left: threads that wait for it and may never come home.
    """

    def __init__(self, when_lost: Callable[[], None]) -> None:
        self.lost = False
        self.left: list[threading.Thread] = []
        self._when_lost = when_lost
        self._told = threading.Event()

    def lose(self) -> None:
        """Tell whoever waits that nobody answers any more."""
        self.lost = True
        self._told.set()
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
        self._told.clear()

        def ask() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:
                outcome.append((None, error))
            self._told.set()

        self.check()
        asking = threading.Thread(target=ask, name="jaxcoll-ask", daemon=True)
        asking.start()
        self._told.wait()
        if not outcome:
            self.left.append(asking)
            raise CoordinatorLostError
        result, error = outcome[0]
        if isinstance(error, StoreUnreachableError):
            self.lose()
            raise CoordinatorLostError from error
        if error is not None:
            raise error
        return result
