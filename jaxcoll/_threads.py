"""Threads that can be abandoned in a blocking call, and what runs when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from jaxcoll._compat.coordination import leave_coordinator

_LOOK_SECONDS = 0.02
_END_SECONDS = 1.0


class Behind(Protocol):
    """What may still be in a call: a thread, or one that has come home between two calls."""

    def is_alive(self) -> bool: ...


_left: list[Behind] = []
_status: Any = None
_at_exit: list[Callable[[], Any]] = []


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
    until = time.monotonic() + _END_SECONDS
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


def at_exit(call: Callable[[], Any]) -> None:
    """Have Python call this when the process ends."""
    _at_exit.append(call)
    atexit.register(call)


def not_at_exit(call: Callable[[], Any]) -> None:
    """Have it not called any more."""
    _at_exit[:] = [other for other in _at_exit if other != call]
    atexit.unregister(call)


def _leave_to_parent() -> None:
    """A forked child that ends must not speak for its parent, nor remove what that one uses."""
    if not _at_exit:
        return
    for call in _at_exit:
        atexit.unregister(call)
    _at_exit.clear()
    leave_coordinator(to_parent=True)  # JAX would shut it down when the child ends


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
