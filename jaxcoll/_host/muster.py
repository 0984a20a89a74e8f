"""Whether all are still there in JAX's own meetings, which end in a signal, or minutes later.

Between the coordinator's "go" and the first use of devices every process waits for all others
twice: when JAX's clients connect, and when they tell each other of their devices. Both are bounded
here by the time that the user chose.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxcoll._compat_coordination import store
from jaxcoll._host.given_up import leave_behind
from jaxcoll._host.relay import give_up_coordinator
from jaxcoll._plan.errors import DeadlineExceededError

_POLL_SECONDS = 0.02
_FOLDER = "jaxcoll/devices"

FOREVER = 24 * 3600
"""Seconds: what JAX is told of a wait that it would end with a signal."""


def connected(connect: Callable[[], Any], line: socket.socket, timeout: float) -> None:
    """`connect()`, in which all processes wait for each other.

    Args:
      connect: enters JAX's own world.
      line: to the coordinator, which tells who has ended.
      timeout: seconds.

    Raises:
      DeadlineExceededError: not all came in time; those that have ended are named.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            connect()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="jaxcoll-connect", daemon=True)
    thread.start()
    try:
        thread.join(timeout)
        if thread.is_alive():
            ended = _ended(line)
            who = f"process{'es' * (len(ended) > 1)} {', '.join(map(str, ended))} ended meanwhile"
            raise DeadlineExceededError(
                "`initialize`: all processes had arrived, but did not connect to each other within "
                f"{timeout:g} s: {who if ended else 'one is stopped, or cut off'}.",
                ranks=ended,
            )
    except BaseException:
        leave_behind(thread)
        give_up_coordinator()
        raise
    if failed:
        raise failed[0]


def _ended(line: socket.socket) -> list[int]:
    """Who has ended since all had arrived, as the coordinator tells line by line."""
    heard = b""
    while select.select([line], [], [], 0.0)[0] and (chunk := line.recv(1 << 16)):
        heard += chunk
    said = [json.loads(text) for text in heard.splitlines(keepends=True) if text.endswith(b"\n")]
    return sorted({one["ended"] for one in said if "ended" in one})


def await_all(timeout: float) -> None:
    """Wait until every process is about to tell the others of its devices, or did so before.

    Raises:
      DeadlineExceededError: some did not come in time; they are named.
    """
    keys = store()
    if keys is None:
        return
    keys.set(f"{_FOLDER}/{keys.process}", "here")
    until = time.monotonic() + timeout
    while len(here := keys.all(_FOLDER)) < keys.processes:
        if time.monotonic() > until:
            keys.delete(f"{_FOLDER}/{keys.process}")  # who comes later shall not count on this one
            absent = [rank for rank in range(keys.processes) if str(rank) not in here]
            raise DeadlineExceededError(
                f"Process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of "
                f"{keys.processes} did not begin to use devices within {timeout:g} s of this one, "
                "as all have to before any can. A larger `initialization_timeout` waits longer.",
                ranks=absent,
            )
        time.sleep(_POLL_SECONDS)
