"""Threads that can be abandoned in a call, and a clean exit while one of them is still blocked."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from jaxcoll._compat.coordination import leave_coordinator
from jaxcoll._compat.settings import checks_of_thread
from jaxcoll._job.timing import ABANDONED_SECONDS, POLL_SECONDS


class Task:
    """One call that a worker makes. It is done when the call ends, or when it is abandoned.

    It does what a `concurrent.futures.Future` does with one lock, in a third of the time.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._outcome: dict[None, tuple[Any, BaseException | None]] = {}  # empty, or one item
        self._running = threading.Lock()  # held until there is an outcome
        self._running.acquire()

    def is_done(self) -> bool:
        return bool(self._outcome)

    def end(self, result: Any, error: BaseException | None = None) -> None:
        outcome = result, error
        if self._outcome.setdefault(None, outcome) is outcome:  # atomic
            self._running.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to so many seconds (None: for ever), and return whether the task is done.

        An exception during the wait, such as Ctrl-C, abandons the call.
        """
        try:
            limit = -1.0 if seconds is None else min(seconds, threading.TIMEOUT_MAX)
            if not self._running.acquire(timeout=limit):
                return False
        except BaseException:
            abandon_and_watch_exit(self._worker)
            raise
        self._running.release()
        return True

    def result(self) -> Any:
        """Get the result of a task that is done, or raise its error."""
        result, error = self._outcome[None]
        if error is None:
            return result
        try:
            raise error
        finally:
            del error, self  # the traceback has this frame

    def abandon(self, error: BaseException) -> None:
        """End the task with this error. The call, which may be blocked, stays in its thread."""
        abandon_and_watch_exit(self._worker)
        self.end(None, error)


class Worker:
    """A thread that makes one call after another, and can be abandoned in any of them.

    An abandoned call keeps the thread until it returns; calls submitted later run after it. The
    thread ends when its worker is garbage-collected, and Python does not wait for it at exit.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._unfinished: deque[None] = deque()  # one for each call that has not returned
        if _end not in _at_exit:
            call_at_exit(_end)
        _Thread(name, self._calls, self._unfinished).start()

    def __del__(self) -> None:
        self.close()

    def is_alive(self) -> bool:
        return bool(self._unfinished)

    def submit(self, call: Callable[[], Any], task: Task | None = None) -> Task:
        """Queue `call()`, to run with the checks on results (of NaN, say) that this thread has."""
        task = Task(self) if task is None else task
        self._unfinished.append(None)
        self._calls.put((task, call, checks_of_thread()))
        return task

    def close(self) -> None:
        """End the thread after the calls already queued."""
        self._calls.put(None)


class _Thread(threading.Thread):
    """A worker's thread, which does not keep the worker alive."""

    def __init__(self, name: str, calls: queue.SimpleQueue[Any], unfinished: deque[None]) -> None:
        super().__init__(target=_work, args=(calls, unfinished), name=name, daemon=True)
        self.unfinished = unfinished


def _work(calls: queue.SimpleQueue[Any], unfinished: deque[None]) -> None:
    while (item := calls.get()) is not None:
        task, call, checks = item
        error = result = None
        try:
            with checks() if checks else contextlib.nullcontext():
                result = call()
        except BaseException as raised:
            error = raised
        # Late, because a caller that wakes up earlier competes for the interpreter lock.
        task.end(result, error)
        del item, task, call, error, result  # a step's arguments and results are large
        # Last, because arrays are freed in native code, where Python's end would find the thread.
        unfinished.pop()


_abandoned: list[Worker | threading.Thread] = []
_status: Any = None
_at_exit: list[Callable[[], Any]] = []


def call_with_timeout(
    call: Callable[[], Any], seconds: float, poll: Callable[[], None] | None = None
) -> Any:
    """Call, and abandon the call's thread at the timeout (TimeoutError), or when `poll` raises."""
    worker = Worker("jaxcoll-call")
    task = worker.submit(call)
    worker.close()
    until = time.monotonic() + seconds
    longest = POLL_SECONDS if poll else seconds
    try:
        while not task.wait(max(0, min(until - time.monotonic(), longest))):
            if time.monotonic() >= until:
                raise TimeoutError(f"it did not answer within {seconds:g} s")
            if poll:
                poll()
    except BaseException:
        abandon_and_watch_exit(worker)
        raise
    return task.result()


def abandon_and_watch_exit(thread: Worker | threading.Thread) -> None:
    """Stop waiting for a thread that may never return from its call.

    Also replace `sys.exit`: functions that run at exit have no other way to learn the status.
    """
    sys.exit = _exit
    _abandoned[:] = [each for each in _abandoned if each is not thread and each.is_alive()]
    _abandoned.append(thread)


def any_blocked() -> bool:
    """Tell whether an abandoned thread is still in its call."""
    return any(thread.is_alive() for thread in _abandoned)


def _exit(status: Any = None, /) -> NoReturn:
    """Do what `sys.exit` does, and remember the status for `_end`."""
    global _status
    _status = status
    raise SystemExit(status)


def _end() -> None:
    """Wait for threads in a call; exit through `os._exit` if abandoned ones are still blocked.

    A thread that returns from native code while Python shuts down, or later, kills the process
    with a signal. Threads in a collective over Gloo return in time, because its connections were
    shut down; threads that wait for a dead coordinator or another transport may not. So this
    runs Python's exit functions itself, and ends the process at once. (It knows the status from
    `sys.exit` or an uncaught exception, and takes a plain `raise SystemExit` for 0.)
    """
    until = time.monotonic() + ABANDONED_SECONDS
    while any(isinstance(t, _Thread) and t.unfinished for t in threading.enumerate()):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    if not any_blocked():
        return
    cancel_at_exit(_end)
    atexit._run_exitfuncs()
    status = 1 if getattr(sys, "last_value", None) is not None else _status
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit((status or 0) & 0xFF)


def call_at_exit(call: Callable[[], Any]) -> None:
    _at_exit.append(call)
    atexit.register(call)


def cancel_at_exit(call: Callable[[], Any]) -> None:
    _at_exit[:] = [other for other in _at_exit if other != call]
    atexit.unregister(call)


def run_in_forked_child(call: Callable[[], None]) -> Callable[[], None]:
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=call)
    return call


@run_in_forked_child
def _leave_to_parent() -> None:
    """Keep a forked child, when it ends, from signing off for its parent or removing its files."""
    if not _at_exit:
        return
    for call in _at_exit:
        atexit.unregister(call)
    _at_exit.clear()
    leave_coordinator(to_parent=True)  # JAX would shut it down when the child ends
