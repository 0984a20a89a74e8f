"""Whether all are still there in JAX's own meetings, which end in a signal, or minutes later.

Between the coordinator's "go" and the first use of devices every process waits for all others
twice: when JAX's clients connect, and when they tell each other of their devices. Both are bounded
here by the time that the user chose.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxcoll._cluster.coordinator_proxy import give_up_coordinator
from jaxcoll._cluster.liveness import CONNECTED, DEVICES, LEFT, CoordinatorConnection
from jaxcoll._compat.coordination import store
from jaxcoll._errors import DeadlineExceededError, PeerLostError
from jaxcoll._threads import within

_POLL_SECONDS = 0.02
_LEAST_SECONDS = 5.0  # that an exchange may take, once all have begun
_FOLDER, _HERE = "jaxcoll/devices", "here"

FOREVER = 24 * 3600
"""Seconds: what JAX is told of a wait that it would end with a signal."""


def connected(
    connect: Callable[[], Any], line: CoordinatorConnection | None, timeout: float
) -> None:
    """`connect()`, in which all processes wait for each other.

    Args:
      connect: enters JAX's own world.
      line: to the coordinator, which tells who has ended; None: nobody is waited for.
      timeout: seconds.

    Raises:
      DeadlineExceededError: not all came in time.
      PeerLostError: one of them, or the coordinator, ended before it was connected.
      KeyboardInterrupt: somebody waits no longer.
    """
    try:
        with _waiting(line, CONNECTED):
            within(timeout, connect, functools.partial(_check_live, line, (CONNECTED, DEVICES)))
    except TimeoutError:
        give_up_coordinator()
        raise DeadlineExceededError(
            "`initialize`: all processes had arrived, but did not connect to each other within "
            f"{timeout:g} s: one is stopped, or cut off.",
        ) from None
    except (KeyboardInterrupt, PeerLostError):
        give_up_coordinator()
        raise


@contextlib.contextmanager
def _waiting(line: CoordinatorConnection | None, stage: str) -> Iterator[None]:
    """Have the others told, if this process ends, that it came so far; or that it gave up."""
    try:
        yield
    except (TimeoutError, PeerLostError):
        if line is not None:
            line.say(LEFT)
        raise
    if line is not None:
        line.say(stage)


def _check_live(line: CoordinatorConnection | None, stages: Sequence[str]) -> None:
    if line is None:
        return
    if lost := line.lost_before(*stages):
        raise PeerLostError(
            f"Process{'es' * (len(lost) > 1)} {', '.join(map(str, lost))} ended during the start, "
            "when all had arrived and waited for each other. Start the job again.",
            ranks=lost,
        )
    if line.is_broken:
        raise PeerLostError(
            "The coordinator died, or was cut off, during the start, when all had arrived and "
            "waited for each other. Start the job again.",
            ranks=(),
        )


def exchanged(make: Callable[[], Any], line: CoordinatorConnection | None, timeout: float) -> Any:
    """`make()`, in which all processes tell each other of their devices.

    Args:
      make: makes this process's devices known, and waits for the others'.
      line: as in `connected`.
      timeout: seconds, from when the first of them begins.

    Returns:
      What `make` returns.

    Raises:
      DeadlineExceededError: some did not come in time; they are named.
      PeerLostError: one of them, or the coordinator, has ended.
    """
    look = functools.partial(_check_live, line, (DEVICES,))
    try:
        with _waiting(line, DEVICES):
            await_all(timeout, look)
            return within(max(timeout, _LEAST_SECONDS), make, look)
    except DeadlineExceededError:
        raise
    except TimeoutError:
        raise DeadlineExceededError(
            f"Processes did not tell each other of their devices within {timeout:g} s, though all "
            "had begun to: one is stopped, or cut off. A larger `initialization_timeout` waits "
            "longer."
        ) from None


def await_all(timeout: float, look: Callable[[], None]) -> None:
    """Wait until every process is about to tell the others of its devices, or did so before.

    Args:
      timeout: seconds.
      look: called every now and then; what it raises ends the wait.

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
        look()
        time.sleep(_POLL_SECONDS)
