"""Whether all are still there in JAX's own meetings, which end in a signal, or minutes later.

Between the coordinator's "go" and the first use of devices every process waits for all others
twice: when JAX's clients connect, and when they tell each other of their devices. Both are bounded
here by the time that the user chose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxcoll._compat_coordination import store
from jaxcoll._host.ended import Line
from jaxcoll._host.given_up import within
from jaxcoll._host.relay import give_up_coordinator
from jaxcoll._plan.errors import DeadlineExceededError

_POLL_SECONDS = 0.02
_AT_ONCE_SECONDS = 2.0
_FOLDER, _HERE = "jaxcoll/devices", "here"

FOREVER = 24 * 3600
"""Seconds: what JAX is told of a wait that it would end with a signal."""


def connected(connect: Callable[[], Any], line: Line, timeout: float) -> None:
    """`connect()`, in which all processes wait for each other.

    Args:
      connect: enters JAX's own world.
      line: to the coordinator, which tells who has ended.
      timeout: seconds.

    Raises:
      DeadlineExceededError: not all came in time; those that have ended are named.
      KeyboardInterrupt: somebody waits no longer.
    """
    try:
        within(timeout, connect)
    except TimeoutError:
        give_up_coordinator()
        ended = _ended_first({p: said["after"] for p, said in line.news().items()})
        who = f"process{'es' * (len(ended) > 1)} {', '.join(map(str, ended))} ended meanwhile"
        raise DeadlineExceededError(
            "`initialize`: all processes had arrived, but did not connect to each other within "
            f"{timeout:g} s: {who if ended else 'one is stopped, or cut off'}.",
            ranks=ended,
        ) from None
    except KeyboardInterrupt:
        give_up_coordinator()
        raise


def _ended_first(ended: dict[int, float]) -> list[int]:
    """Those that end later, one by one, do so because they waited no longer."""
    first = min(ended.values(), default=0.0)
    return sorted(rank for rank, after in ended.items() if after < first + _AT_ONCE_SECONDS)


def await_all(timeout: float) -> None:
    """Wait until every process is about to tell the others of its devices, or did so before.

    Raises:
      DeadlineExceededError: some did not come in time; they are named.
    """
    keys = store()
    if keys is None:
        return
    keys.set(f"{_FOLDER}/{keys.process}", _HERE)
    until = time.monotonic() + timeout
    while (said := keys.all(_FOLDER)) != dict.fromkeys(map(str, range(keys.processes)), _HERE):
        left = [rank for rank, word in said.items() if word != _HERE]
        if left or time.monotonic() > until:
            keys.set(f"{_FOLDER}/{keys.process}", "left")  # who comes later does not count on it
            absent = [rank for rank in range(keys.processes) if str(rank) not in said]
            raise DeadlineExceededError(
                f"Process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of "
                f"{keys.processes} did not begin to use devices within {timeout:g} s of the first, "
                "as all have to before any can. A larger `initialization_timeout` waits longer."
                if absent
                else f"This process began to use devices when process {', '.join(sorted(left))} "
                "waited for it no longer. A larger `initialization_timeout` waits longer.",
                ranks=absent or sorted(map(int, left)),
            )
        time.sleep(_POLL_SECONDS)
