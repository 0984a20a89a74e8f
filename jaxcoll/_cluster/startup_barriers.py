"""Apply the user's timeout to JAX's two start-up barriers, which abort the process or take minutes.

Once all processes have arrived at the coordinator, each waits for all others twice: when JAX's
clients connect, and when they exchange their devices.
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
_LEAST_SECONDS = 5.0  # that the exchange may take, once all have begun
_FOLDER, _HERE = "jaxcoll/devices", "here"


def connected(
    connect: Callable[[], Any], connection: CoordinatorConnection | None, timeout: float
) -> None:
    """`connect()`, which enters JAX's own world when all processes do."""
    try:
        with _barrier(connection, CONNECTED, DEVICES) as check:
            within(timeout, connect, check)
    except TimeoutError:
        give_up_coordinator()
        raise DeadlineExceededError(
            "`initialize`: all processes had arrived, but did not connect to each other within "
            f"{timeout:g} s: one is stopped, or cut off.",
        ) from None
    except (KeyboardInterrupt, PeerLostError):
        give_up_coordinator()
        raise


def exchanged(
    make: Callable[[], Any], connection: CoordinatorConnection | None, timeout: float
) -> Any:
    """`make()`, in which all processes tell each other of their devices, once all have begun to."""
    try:
        with _barrier(connection, DEVICES) as check:
            await_all(timeout, check)
            return within(max(timeout, _LEAST_SECONDS), make, check)
    except DeadlineExceededError:
        raise
    except TimeoutError:
        raise DeadlineExceededError(
            f"Processes did not tell each other of their devices within {timeout:g} s, though all "
            "had begun to: one is stopped, or cut off. A larger `initialization_timeout` waits "
            "longer."
        ) from None


@contextlib.contextmanager
def _barrier(connection: CoordinatorConnection | None, *stages: str) -> Iterator[Any]:
    """Yield a check that nobody ended before these stages, and report when the first is passed."""
    if connection is None:
        yield None
        return
    try:
        yield functools.partial(_check_live, connection, stages)
    except (TimeoutError, PeerLostError):
        connection.report(stage=LEFT)  # lest those who notice this end later blame this process
        raise
    connection.report(stage=stages[0])


def _check_live(connection: CoordinatorConnection, stages: Sequence[str]) -> None:
    if lost := connection.lost_before(*stages):
        raise PeerLostError(
            f"Process{'es' * (len(lost) > 1)} {', '.join(map(str, lost))} ended during the start, "
            "when all had arrived and waited for each other. Start the job again.",
            ranks=lost,
        )
    if connection.is_broken:
        raise PeerLostError(
            "The coordinator died, or was cut off, during the start, when all had arrived and "
            "waited for each other. Start the job again.",
            ranks=(),
        )


def await_all(timeout: float, check: Callable[[], None] | None = None) -> None:
    """Wait until every process is about to exchange its devices, or did so before."""
    # JAX's own barrier would not do: it does not say who is missing, and a process that gives up
    # cannot take its arrival back.
    keys = store()
    if keys is None:
        return
    keys.set(f"{_FOLDER}/{keys.process}", _HERE)
    until = time.monotonic() + timeout
    everyone = dict.fromkeys(map(str, range(keys.processes)), _HERE)
    while (states := keys.all(_FOLDER)) != everyone:
        left = sorted(int(rank) for rank, state in states.items() if state != _HERE)
        if left or time.monotonic() > until:
            keys.set(f"{_FOLDER}/{keys.process}", "left")  # for those who come later
            absent = [rank for rank in range(keys.processes) if str(rank) not in states]
            raise DeadlineExceededError(
                f"Process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of "
                f"{keys.processes} did not begin to use devices within {timeout:g} s of the first, "
                "as all have to before any can. A larger `initialization_timeout` waits longer."
                if absent
                else f"This process began to use devices when process "
                f"{', '.join(map(str, left))} no longer waited for it. A larger "
                "`initialization_timeout` waits longer.",
                ranks=absent or left,
            )
        if check is not None:
            check()
        time.sleep(_POLL_SECONDS)
