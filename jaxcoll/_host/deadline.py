"""Bounds the time that the host waits for a program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._plan.errors import DeadlineExceededError


def finished(call: Callable[[], Any], timeout_seconds: float | None, what: str) -> Any:
    """`call()`, waited for to the end if there is a deadline.

    Args:
      call: dispatches a compiled program; it must not trace, since it may run in a thread.
      timeout_seconds: seconds; None and 0 mean no deadline, and then nothing is waited for.
      what: what is named in the message.

    Returns:
      What `call` returns.

    Raises:
      DeadlineExceededError: it took longer. The wait is given up, not the program: it ends
        when it can, and the process stays usable.
    """
    if not timeout_seconds:
        return call()
    outcome: list[tuple[bool, Any]] = []

    def wait() -> None:
        try:
            outcome.append((True, jax.block_until_ready(call())))
        except BaseException as error:  # noqa: BLE001 - handed over to the caller's thread
            outcome.append((False, error))

    thread = threading.Thread(target=wait, name="jaxcoll-deadline", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not outcome:
        raise DeadlineExceededError(f"{what} did not finish within {timeout_seconds:g} s.")
    succeeded, value = outcome[0]
    if succeeded:
        return value
    raise value
