"""Threads whose calls can be abandoned, and a clean exit while one of them is still blocked."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jaxcoll._compat.coordination import leave_coordinator
from jaxcoll._compat.settings import checks_of_thread

_LOOK_SECONDS = 0.02
_EXIT_SECONDS = 0.5  # how long the exit waits for abandoned calls to return


class Task:
    """One call for a worker to make. It is settled once, by whatever comes first."""

    def __init__(
        self, worker: Worker, call: Callable[[], Any], then: Callable[[], Any] | None = None
    ) -> None:
        self.is_settled = False  # whether `result` returns at once
        self._worker, self._then = worker, then
        self._call: Callable[[], Any] | None = call
        self._checks = checks_of_thread()
        self._outcome: tuple[BaseException | None, Any] = None, None
        # A bare lock: its hand-over between threads takes half the time of an event's.
        self._settling, self._unsettled = threading.Lock(), threading.Lock()
        self._unsettled.acquire()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait so many seconds (None: without an end); whether it is settled by then.

        An exception meanwhile, such as Ctrl-C, abandons the call.
        """
        bound = -1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        try:
            if not self._unsettled.acquire(timeout=bound):
                return False
        except BaseException:
            abandon(self._worker)
            raise
        self._unsettled.release()  # for whoever else waits
        return True

    def result(self) -> Any:
        """What the call of a settled task returned; or what it raised is raised."""
        error, result = self._outcome
        if error is not None:
            raise error
        return result

    def abandon(self, error: BaseException) -> None:
        """Settle it with this error, and leave the call, which may be blocked, to its thread."""
        abandon(self._worker)
        self.settle(error)

    def run(self) -> None:
        """Make the call, in the worker's thread, and settle it."""
        outcome = self._make()
        self._worker.returned()
        # Last: a caller that wakes earlier only contends for the interpreter.
        self.settle(*outcome)

    def _make(self) -> tuple[BaseException | None, Any]:
        """What the call raised, and what it returned."""
        call, self._call = self._call, None  # its arguments may be large
        try:
            assert call is not None
            with self._checks():
                return None, call()
        except BaseException as error:
            return error, None

    def settle(self, error: BaseException | None, result: Any = None) -> None:
        """Let `wait` return, unless the task is settled."""
        if self._settling.acquire(blocking=False):
            self._outcome, self.is_settled = (error, result), True
            self._unsettled.release()
            if self._then is not None:
                self._then()


class Worker:
    """A thread that makes one call after another, and may be abandoned in any of them.

    An abandoned call stays in the thread to its end, and what is submitted next begins after it.
    The thread ends when nobody has the worker any more.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._submitted = self._returned = 0
        # Not a method of this worker, which would keep it alive.
        threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True).start()

    def __del__(self) -> None:
        self.close()

    def is_alive(self) -> bool:
        """Whether it still has a call to make, or is in one."""
        return self._returned < self._submitted

    def submit(self, call: Callable[[], Any], then: Callable[[], Any] | None = None) -> Task:
        """Have the thread make `call()`; `then()` follows when the task is settled."""
        task = Task(self, call, then)
        self.start(task)
        return task

    def start(self, task: Task) -> None:
        """Have the thread make the call of a task that is this worker's."""
        with self._lock:
            self._submitted += 1
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after the calls that it was given."""
        self._tasks.put(None)

    def returned(self) -> None:
        """A call has returned, in the thread."""
        self._returned += 1


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # a step's results are large


_abandoned: list[Worker | threading.Thread] = []
_status: Any = None
_at_exit: list[Callable[[], Any]] = []


def within(seconds: float, call: Callable[[], Any], look: Callable[[], None] | None = None) -> Any:
    """`call()`, in a thread that is abandoned after so long (TimeoutError), or if `look` raises."""
    worker = Worker("jaxcoll-within")
    task = worker.submit(call)
    worker.close()
    until = time.monotonic() + seconds
    longest = _LOOK_SECONDS if look else seconds
    try:
        while not task.wait(max(0, min(until - time.monotonic(), longest))):
            if time.monotonic() >= until:
                raise TimeoutError(f"it did not answer within {seconds:g} s")
            if look:
                look()
    except BaseException:
        abandon(worker)
        raise
    return task.result()


def abandon(thread: Worker | threading.Thread) -> None:
    """Wait no longer for a thread that may never return from its call.

    From now on `sys.exit` is replaced, because nothing else hands the status to what runs at exit.
    """
    if sys.exit is not _exit:
        at_exit(_end)
        sys.exit = _exit
    _abandoned[:] = [each for each in _abandoned if each is not thread and each.is_alive()]
    _abandoned.append(thread)


def any_blocked() -> bool:
    """Whether an abandoned thread is still in its call."""
    return any(thread.is_alive() for thread in _abandoned)


def _exit(status: Any = None, /) -> NoReturn:
    """`sys.exit`, which remembers the status for `_end`."""
    global _status
    _status = status
    raise SystemExit(status)


def _end() -> None:
    """Exit through `os._exit` if abandoned threads are still blocked.

    A thread that returns from foreign code while Python ends, or after, takes the process down
    with a signal. Those in a collective over Gloo return in time, because its connections were
    shut; those that wait for a dead coordinator or another transport may not. For these, what
    Python does at exit is done here, and the process then ends at once. (The status is known from
    `sys.exit` or an uncaught exception; a bare `raise SystemExit` is taken for 0.)
    """
    until = time.monotonic() + _EXIT_SECONDS
    while any_blocked():
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


def in_forked_child(call: Callable[[], None]) -> Callable[[], None]:
    """Have this called in every child that is forked."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=call)
    return call


@in_forked_child
def _leave_to_parent() -> None:
    """A forked child that ends must not speak for its parent, nor remove what that one uses."""
    if not _at_exit:
        return
    for call in _at_exit:
        atexit.unregister(call)
    _at_exit.clear()
    leave_coordinator(to_parent=True)  # JAX would shut it down when the child ends
