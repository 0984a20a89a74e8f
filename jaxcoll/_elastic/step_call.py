"""One call of an elastic run's step, abandoned if the generation ends meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._cluster.timing import HEARTBEAT_SECONDS, SILENT_WORKER_SECONDS
from jaxcoll._elastic.generation import RegroupError
from jaxcoll._elastic.membership import Membership
from jaxcoll._threads import Worker, abandon

_worker: Worker | None = None


def outcome_of(
    call: Callable[[], Any], membership: Membership, seconds: float | None, what: str
) -> Any:
    """`call()`, waited for until it is done or this generation is over.

    When a worker dies in a collective, only its neighbours get an error; others wait for a message
    that nobody sends. So another thread makes the call, and is abandoned then.

    Args:
      call: dispatches a compiled program, and traces nothing.
      membership: tells when the generation is over.
      seconds: after which this worker asks for a new generation; None: never.
      what: names the call in that request.

    Raises:
      RegroupError: the generation is over.
    """
    global _worker
    worker = _worker = _worker or Worker("jaxcoll-step")
    task = worker.submit(lambda: jax.block_until_ready(call()), then=membership.woken.set)
    until = time.monotonic() + (seconds or float("inf"))
    try:
        while True:
            membership.woken.clear()  # first: what comes after it wakes the wait below
            if task.is_settled:
                break
            membership.check()
            membership.check_members()
            left = until - time.monotonic()
            if left <= 0:
                membership.ask(f"{what} did not finish within {seconds:g} s", late=True)
                raise RegroupError
            # Who stopped writing must be known by the time a new generation is asked for.
            if left < SILENT_WORKER_SECONDS + HEARTBEAT_SECONDS:
                membership.observe()
            membership.woken.wait(min(left, HEARTBEAT_SECONDS))
    except BaseException as error:  # Ctrl-C, too
        # One worker's corrupted sum ends the generation; the others have it too, and must count it.
        over = isinstance(error, RegroupError) and membership.corrupted
        if over and task.wait(SILENT_WORKER_SECONDS):
            return task.result()
        _worker = None  # the next call must not wait behind this one
        worker.close()
        abandon(worker)
        raise
    return task.result()
