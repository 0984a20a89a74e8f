"""The one place where the host runs programs: with other processes, in time, and in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.executable import compiled_for
from jaxcoll._dispatch.process_group import ProcessGroup
from jaxcoll._dispatch.watchdog import group_of
from jaxcoll._errors import DeadlineExceededError
from jaxcoll._threads import Task, Worker, abandon, at_exit, not_at_exit

_workers: dict[str, Worker] = {}
"""One worker for each process group. Groups have connections of their own, so that their calls may
overlap; two programs of one group would mix their messages."""

_alone = threading.local()
"""For calls within this process each thread has a worker: so they overlap, as without a deadline,
and a callback of a program may make some, too."""

_started: list[tuple[Task, Callable[[], Any]]] = []
"""Calls that may still run, and that nobody may ever wait for; and what waits for them."""


def run(call: Call, until: float | None = None) -> Any:
    """Make one call.

    The result is waited for if there is a deadline, or Gloo below it. The program then runs in
    another thread, because a backend may run a program while it dispatches it, as XLA's CPU backend
    does with small ones; and over several processes always, so that news of another's failure ends
    the wait.

    Args:
      call: the call.
      until: when its deadline passes, by `time.monotonic`; None: as long from now as it has.

    Raises:
      PeerLostError: another process has died, or was cut off.
      ProgramMismatchError: processes call different programs.
      DeadlineExceededError: it took longer; it names the processes that did not arrive. The wait
        is given up, not the program: it ends when it can, and the process stays usable. What is
        called next over the same processes begins after that.
    """
    group = group_of(call.devices)
    if group is None and not call.timeout_seconds:
        worker = getattr(_alone, "worker", None)
        # After a call that was given up, others wait in its worker, so that none overtakes it.
        if worker is None or not worker.is_alive():
            return call.program(*call.args, **call.kwargs)
    return _begun(call, group, until)[1]()


def run_all(calls: Sequence[Call]) -> list[Any]:
    """What each call returns, made one after another within the deadline of the first."""
    seconds = calls[0].timeout_seconds
    until = time.monotonic() + seconds if seconds else None
    return [run(call, until) for call in calls]


def start(call: Call) -> Callable[[], Any]:
    """Begin one call: the function that is returned waits, returns and raises as `run` does.

    Calls over the same processes run one after another, in the order in which they begin. The
    deadline counts from here.
    """
    group = group_of(call.devices)
    if group is None and not call.timeout_seconds:
        result = run(call)
        return lambda: result
    task, finish = _begun(call, group, None)
    _started[:] = [*(one for one in _started if not one[0].is_settled), (task, finish)]
    not_at_exit(_await_started)  # so that it is registered last, and runs first
    at_exit(_await_started)
    return finish


def _await_started() -> None:
    """Wait, at exit, for programs that the other processes run too: Python must not end in one."""
    for _, finish in _started:
        with contextlib.suppress(Exception):
            finish()


def _begun(
    call: Call, group: ProcessGroup | None, until: float | None
) -> tuple[Task, Callable[[], Any]]:
    """Have a worker make a call: its task, and what waits for that."""
    # Compiled in this thread: a trace belongs to the thread whose JAX configuration it is made
    # under. The deadline is read after that, because a trace may ask for a shorter one.
    program = compiled_for(call, shared=group is not None)
    seconds = call.timeout_seconds
    position = 0

    def make() -> Any:
        nonlocal position
        if group is None:
            return jax.block_until_ready(program.compiled(*call.args, **call.kwargs))
        position = group.position + 1
        # Something that failed over Gloo may never be ready: whoever waited for it would hang.
        wait = bool(seconds) or call.devices[0].platform == "cpu"
        return group.run(program, call.args, call.kwargs, wait)

    worker = _worker_of(group)
    task = Task(worker, make)
    if group is not None:
        group.check()
        group.register(task)  # before it starts, so that it misses no failure
    if until is None and seconds:
        until = time.monotonic() + seconds
    task.start()

    def finish() -> Any:
        if task.wait(None if until is None else max(0.0, until - time.monotonic())):
            return task.result()
        abandon(worker)
        ranks, why = (), ""
        if group is not None and not position:
            why = (
                " It has not begun: an earlier call over the same processes, which was given up, "
                "has not ended yet."
            )
        elif group is not None:
            ranks, who = group.arrivals(position)
            why = f" {who} {program.starts_with()}"
        text = f"{call.name} did not finish within {seconds:g} s.{why}"
        raise DeadlineExceededError(text, ranks=ranks)

    return task, finish


def _worker_of(group: ProcessGroup | None) -> Worker:
    if group is not None:
        if group.name not in _workers:
            _workers[group.name] = Worker("jaxcoll-worker")
        return _workers[group.name]
    if getattr(_alone, "worker", None) is None:
        _alone.worker = Worker("jaxcoll-worker")
    return _alone.worker
