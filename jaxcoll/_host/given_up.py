"""Calls that others end, and threads that are left behind in them."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import jax

from jaxcoll._host.at_exit import at_exit, not_at_exit
from jaxcoll._host.beats import BEAT_SECONDS, LOST_SECONDS
from jaxcoll._host.crew import Crew
from jaxcoll._host.decision import RegroupError

_LOOK_SECONDS = 0.02


class Behind(Protocol):
    """What may still be in a call: a thread, or one that has come home between two calls."""

    def is_alive(self) -> bool: ...


_left: list[Behind] = []
_status: Any = None


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
            leave_behind(maker)
            raise
        crew.woken.wait(min(left, BEAT_SECONDS))
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def within(seconds: float, call: Callable[[], Any], look: Callable[[], None] | None = None) -> Any:
    """`call()`, in a thread that is left behind if it takes longer.

    Args:
      seconds: how long.
      call: what is called.
      look: called every now and then while it is waited for; what it raises ends the wait.

    Returns:
      What `call` returns.

    Raises:
      TimeoutError: it took longer.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="jaxcoll-within", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    try:
        while thread.is_alive() and (left := until - time.monotonic()) > 0:
            thread.join(left if look is None else min(left, _LOOK_SECONDS))
            if look is not None and not outcome:
                look()
        if not outcome:
            raise TimeoutError(f"it did not answer within {seconds:g} s")
    except BaseException:  # Ctrl-C, too
        leave_behind(thread)
        raise
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def leave_behind(thread: Behind) -> None:
    """Wait no more for a thread that may never come home."""
    if sys.exit is not _exit:
        at_exit(_end)
        sys.exit = _exit
    _left[:] = [other for other in _left if other is not thread and other.is_alive()] + [thread]


def are_left() -> bool:
    """Whether threads that were left behind are still not home."""
    return any(thread.is_alive() for thread in _left)


def _exit(status: Any = None, /) -> NoReturn:
    """`sys.exit`, which tells nobody else what it was given."""
    global _status
    _status = status
    raise SystemExit(status)


def _end() -> None:
    """End the process, if threads that were left behind are still not home.

    Those in a collective over Gloo are, because its connections were shut; what waits for a dead
    coordinator or another transport may not be. One that comes home while Python ends, or after,
    takes the process down with a signal. So what Python does at exit is done here, and the process
    then ends at once. (A status is known from `sys.exit` or an uncaught exception; one that was
    only raised, as `SystemExit`, would be taken for 0.)
    """
    until = time.monotonic() + BEAT_SECONDS
    while are_left():
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    else:
        return
    not_at_exit(_end)
    atexit._run_exitfuncs()
    status = 1 if getattr(sys, "last_value", None) is not None else _status
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit((status or 0) & 0xFF)
