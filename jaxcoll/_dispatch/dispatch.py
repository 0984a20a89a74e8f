"""The one place where the host runs programs: with other processes, in time, and in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.executable import Program, compiled_for
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


def run(call: Call) -> Any:
    """Make one call: see `run_all`."""
    return run_all([call])[0]


def start(call: Call) -> Callable[[], Any]:
    """Begin one call: the function that is returned waits, returns and raises as `run` does.

    Calls over the same processes run one after another, in the order in which they begin. The
    deadline counts from here.
    """
    task, finish = _begin([call], call.devices)
    if task is not None:
        _started[:] = [*(each for each in _started if not each[0].is_settled), (task, finish)]
        not_at_exit(_await_started)  # so that it is registered last, and runs first
        at_exit(_await_started)
    return lambda: finish()[0]


def _await_started() -> None:
    """Wait, at exit, for programs that the other processes run too: Python must not end in one."""
    for _, finish in _started:
        with contextlib.suppress(Exception):
            finish()


def run_all(calls: Sequence[Call]) -> list[Any]:
    """What each call returns, made one after another; the name and options of the first hold.

    Results are waited for if there is a deadline, or Gloo below them. The programs then
    run in another thread, because a backend may run a program while it dispatches it, as XLA's CPU
    backend does with small ones; and over several processes always, so that news of another's
    failure ends the wait.

    Raises:
      PeerLostError: another process has died, or was cut off.
      ProgramMismatchError: processes call different programs.
      DeadlineExceededError: it took longer; it names the processes that did not arrive. The wait
        is given up, not the program: it ends when it can, and the process stays usable. What is
        called next over the same processes begins after that.
    """
    first = calls[0]
    devices = first.devices
    if len(calls) > 1:
        devices = tuple(dict.fromkeys(device for call in calls for device in call.devices))
    return _begin(calls, devices)[1]()


def _begin(
    calls: Sequence[Call], devices: Sequence[jax.Device]
) -> tuple[Task | None, Callable[[], list[Any]]]:
    """Begin calls: the task of a worker that makes them, if one does; and what waits for them."""
    first, group = calls[0], group_of(devices)
    worker = getattr(_alone, "worker", None) if group is None else _workers.get(group.name)
    # After a call that was given up, others wait in its worker, so that none overtakes it.
    is_busy = worker is not None and worker.is_alive()
    if group is None and not first.timeout_seconds and not is_busy:
        results = [call.program(*call.args, **call.kwargs) for call in calls]
        return None, lambda: results
    # Compiled in this thread: a trace belongs to the thread whose JAX configuration it is made
    # under. The deadline is read after that, because a trace may ask for a shorter one.
    groups = [group] if len(calls) == 1 else [group_of(call.devices) for call in calls]
    execution = _Execution(calls, groups)
    seconds = first.timeout_seconds
    if worker is None:
        worker = Worker("jaxcoll-worker")
        if group is None:
            _alone.worker = worker
        else:
            worker = _workers.setdefault(group.name, worker)
    # Something that failed over Gloo may never be ready: whoever waited for it would hang.
    over_gloo = group is not None and devices[0].platform == "cpu"
    execution.is_waited_for = bool(seconds) or over_gloo
    task = Task(worker, execution.run)
    if group is not None:
        group.check()
    for each in filter(None, {group, *groups}):  # before it starts, so that it misses no failure
        each.register(task)
    until = time.monotonic() + seconds if seconds else None
    worker.start(task)

    def finish() -> list[Any]:
        if task.wait(None if until is None else max(0.0, until - time.monotonic())):
            return task.result()
        abandon(worker)
        ranks, why = execution.late()
        text = f"{first.name} did not finish within {seconds:g} s.{why}"
        raise DeadlineExceededError(text, ranks=ranks)

    return task, finish


class _Execution:
    """Calls that one worker makes, each with a process group or alone, and how far it is."""

    def __init__(self, calls: Sequence[Call], groups: Sequence[ProcessGroup | None]) -> None:
        self._calls, self._groups = calls, groups
        self._programs = [
            compiled_for(call, shared=group is not None)
            for call, group in zip(calls, groups, strict=True)
        ]
        self.is_waited_for = True  # whether results are
        self._begun: tuple[ProcessGroup, Program, int] | None = None

    def run(self) -> list[Any]:
        """Make them all, in the worker's thread."""
        results = []
        for call, group, program in zip(self._calls, self._groups, self._programs, strict=True):
            if group is None:
                result = program.compiled(*call.args, **call.kwargs)
            else:
                self._begun = group, program, group.position + 1
                result = group.run(program, call.args, call.kwargs, self.is_waited_for)
            results.append(result)
        if self.is_waited_for and None in self._groups:  # a group has waited for its own
            jax.block_until_ready(results)
        return results

    def late(self) -> tuple[tuple[int, ...], str]:
        """The processes that did not arrive, and why the call is late, in words."""
        if self._begun is not None:
            group, program, position = self._begun
            ranks, who = group.arrivals(position)
            return ranks, f" {who} {program.starts_with}"
        if not any(self._groups):
            return (), ""
        return (), (
            " It has not begun: an earlier call over the same processes, which was given up, has "
            "not ended yet."
        )
