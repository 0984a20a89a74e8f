"""One call of an elastic run's step, in a thread that is abandoned if the members change."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._elastic.generation import RegroupError
from jaxcoll._elastic.heartbeat import BEAT_SECONDS, LOST_SECONDS
from jaxcoll._elastic.membership import Crew
from jaxcoll._threads import abandon


class _Maker:
    """A thread that makes one call after another, until it is left behind in one.

    Attributes:
      ends: it makes no more calls after the present one.
    """

    def __init__(self) -> None:
        self.ends = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[..., None]]] = (
            queue.SimpleQueue()
        )
        self._busy = False
        threading.Thread(target=self._work, name="jaxcoll-step", daemon=True).start()

    def is_alive(self) -> bool:
        """Whether it is in a call."""
        return self._busy

    def take(self, call: Callable[[], Any], tell: Callable[..., None]) -> None:
        self._busy = True
        self._calls.put((call, tell))

    def _work(self) -> None:
        while not self.ends:
            call, tell = self._calls.get()
            try:
                found = jax.block_until_ready(call()), None
            except BaseException as error:
                found = None, error
            self._busy = False
            tell(found)
            del call, tell, found  # a step's arguments and results are large


_maker: _Maker | None = None


def outcome_of(call: Callable[[], Any], crew: Crew, seconds: float | None, what: str) -> Any:
    """`call()`, waited for until it is done or this generation of `crew` is over.

    Of a collective in which a worker died only its neighbours get an error; others wait in it for a
    message that nobody sends. So it is made by another thread, which is left behind then.

    Args:
      call: dispatches a compiled program, and traces nothing.
      crew: says when the generation is over.
      seconds: after which this worker asks for a new generation; None: never.
      what: what is named then.

    Returns:
      What `call` returns, ready.

    Raises:
      RegroupError: the generation is over.
      CoordinatorLostError: there is nobody to ask.
    """
    global _maker
    outcome: list[tuple[Any, BaseException | None]] = []

    def tell(found: tuple[Any, BaseException | None]) -> None:
        outcome.append(found)
        crew.woken.set()

    maker = _maker = _maker or _Maker()
    maker.take(call, tell)
    until = time.monotonic() + (seconds or float("inf"))
    while True:
        crew.woken.clear()
        if outcome:
            break
        try:
            crew.check()
            crew.miss()
            left = until - time.monotonic()
            if left <= 0:
                crew.ask(f"{what} did not finish within {seconds:g} s", late=True)
                raise RegroupError
            if left < LOST_SECONDS + BEAT_SECONDS:
                crew.observe()
        except BaseException:
            _maker = None  # the next call is another thread's
            maker.ends = True
            abandon(maker)  # pyright: ignore[reportArgumentType]
            raise
        crew.woken.wait(min(left, BEAT_SECONDS))
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
