"""Bounds the time that the host waits for a program."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._plan.errors import DeadlineExceededError

_given_up: threading.Thread | None = None
"""The last call that nobody waits for any more, which ends after all those before it."""


def prepared(
    program: Any, timeout_seconds: float | None, *args: Any, **kwargs: Any
) -> Callable[[], Any]:
    """A call of a jitted program, ready for `finished`.

    With a deadline it will run in another thread, so it is compiled here: a trace belongs to
    the thread whose JAX configuration it was asked for under.
    """
    if timeout_seconds:
        program = program.lower(*args, **kwargs).compile()
    return functools.partial(program, *args, **kwargs)


def finished(call: Callable[[], Any], timeout_seconds: float | None, what: str) -> Any:
    """`call()`, waited for to the end if there is a deadline.

    The call itself is made in a thread, because a backend may run a program while it
    dispatches it, as XLA's CPU does in a process with one device.

    Args:
      call: dispatches compiled programs and traces nothing; see `prepared`.
      timeout_seconds: seconds; None and 0 mean no deadline, and then nothing is waited for.
      what: what is named in the message.

    Returns:
      What `call` returns.

    Raises:
      DeadlineExceededError: it took longer. The wait is given up, not the program: it ends
        when it can, and the process stays usable. What is called next begins after that, because
        two programs at once would take each other's messages.
    """
    global _given_up
    before = _given_up
    if not timeout_seconds:
        if before:
            before.join()
        return call()
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def wait() -> None:
        if before:
            before.join()
        try:
            outcome.append(jax.block_until_ready(call()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="jaxcoll-deadline", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if errors:
        raise errors[0]
    if not outcome:
        _given_up = thread
        raise DeadlineExceededError(f"{what} did not finish within {timeout_seconds:g} s.")
    return outcome[0]
