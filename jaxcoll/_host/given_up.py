"""Calls that others end, and threads that are left behind in them."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._host.crew import BEAT_SECONDS, LOST_SECONDS, Crew, RegroupError

_left: list[threading.Thread] = []
_first_to_end = True


def outcome_of(call: Callable[[], Any], crew: Crew, seconds: float | None, what: str) -> Any:
    """`call()`, waited for until it is done or this generation of `crew` is over.

    Of a collective in which a worker died only its neighbours get an error; others wait in it for a
    message that nobody sends. So it runs in a thread of its own, which is left behind then.

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
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((jax.block_until_ready(call()), None))
        except BaseException as error:
            outcome.append((None, error))
        crew.woken.set()

    thread = threading.Thread(target=work, name="jaxcoll-step", daemon=True)
    thread.start()
    until = time.monotonic() + (seconds or float("inf"))
    while True:
        crew.woken.clear()
        if outcome:
            break
        try:
            crew.check()
            left = until - time.monotonic()
            if left <= 0:
                crew.ask(f"{what} did not finish within {seconds:g} s", late=True)
                raise RegroupError
            if left < LOST_SECONDS + BEAT_SECONDS:
                crew.observe()
        except BaseException:
            _leave(thread, crew)
            raise
        crew.woken.wait(min(left, BEAT_SECONDS))
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _leave(thread: threading.Thread, crew: Crew) -> None:
    global _first_to_end
    if not _left:
        atexit.register(_end)
    _left[:] = [other for other in _left if other.is_alive()] + [thread]
    decision = crew.decision
    _first_to_end = decision is None or decision.members[0] == crew.name


def _end() -> None:
    """Let the threads that were left behind come home before Python ends.

    They come when a peer closes its connections, and a thread that comes while Python ends takes
    the process down with a signal. Where all wait for one that is stopped, the first ends with its
    thread asleep, and so wakes the others, who are patient.
    """
    until = time.monotonic() + (BEAT_SECONDS if _first_to_end else 10.0)
    for thread in _left:
        thread.join(max(0.0, until - time.monotonic()))
