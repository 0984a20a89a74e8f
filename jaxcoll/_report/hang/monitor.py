"""Report a hang of any JAX program of several processes: who waits, for whom, and where.

JAX is imported after the program has imported it, because it then reads its settings from the
environment, which the program may set.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from jaxcoll._job.stacks import OURS
from jaxcoll._report.hang.report import say
from jaxcoll._report.profile.script import OnImport
from jaxcoll._report.profile.shield import Shield

EXIT_STATUS = 124
"""The exit status of a program that is ended because it hangs, as `timeout` has."""

_POLL_SECONDS = 0.02
_LONGEST_BEAT = 0.5
_MOST_FAILURES = 10  # in a row: a thread may change while it is looked at
_LONGEST_PAUSE = 1.0  # of this thread on a loaded machine
_FLUSH_SECONDS = 2.0
_END_SECONDS = 10.0  # an import, or a request of the coordinator


class HangWatch(threading.Thread):
    """A thread that looks where this process is, and reports hangs of its job.

    Nothing that it does can raise into the program.

    Args:
      seconds: how long a process may wait for others.
      end: end this process after its report, with `EXIT_STATUS`.
    """

    def __init__(self, seconds: float, *, end: bool = False) -> None:
        self._shield = Shield()
        super().__init__(target=self._shield(self._watch), name=f"{OURS}hang", daemon=True)
        self._limit, self._end = seconds, end
        self._over = threading.Event()
        self._calls: Any = None  # these classes are imported after JAX
        self._here: Any = None
        # Python calls it after what is registered later, such as JAX's: exits are watched as well.
        self._at_exit = self._shield(self.close)
        atexit.register(self._at_exit)

    def _watch(self) -> None:
        self._shield(self._look)()
        if not self._over.is_set():
            say(f"hangs are no longer reported: {self._shield.notes[-1]}")

    def _look(self) -> None:
        """Look again and again, once the program has made devices."""
        from jaxcoll._report.profile.calls import Calls

        self._calls = calls = Calls(Shield())
        beat = min(_LONGEST_BEAT, self._limit / 10)
        self._shield(calls.start)()

        from jaxcoll._compat.settings import has_backend
        from jaxcoll._report.hang.process import HangProcess

        while not has_backend():
            if self._over.wait(_POLL_SECONDS):
                return
        self._here = HangProcess(self._limit, beat, calls, self._shield)
        failed = object()
        look, failures = self._shield(self._here.beat, failed), 0
        now = before = time.monotonic()
        while failures < _MOST_FAILURES and not self._over.is_set():
            reported = look(now)
            if reported is True and self._end:
                self._exit()
            failures = failures + 1 if reported is failed else 0
            self._over.wait(beat)
            # While the process was suspended, it did not wait.
            passed = time.monotonic() - before
            before += passed
            now += min(passed, 2 * beat + _LONGEST_PAUSE)

    def _exit(self) -> None:
        """End the process, but not what it has printed."""
        streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
        # A stream may block: its reader may hang as well, or its lock be another thread's.
        for stream in streams:
            flusher = threading.Thread(target=self._shield(stream.flush), daemon=True)
            flusher.start()
            flusher.join(_FLUSH_SECONDS)
        os._exit(EXIT_STATUS)

    def explain_silence(self) -> None:
        """Say so if nothing was watched."""
        if self.ident is None:
            say("nothing was watched, because the program did not import JAX.")
        elif self._here is None or self._here.peers is None:
            from jaxcoll._compat.coordination import store

            if getattr(store(), "processes", 1) == 1:
                say("nothing was watched, because the program joined no job of several processes.")

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self.ident is not None:
            # A thread that returns from native code while Python shuts down ends the process.
            self.join(_END_SECONDS)
        if self._calls is not None:
            self._calls.stop()  # it may have begun after Python's end did
        if self._here is not None:
            self._here.close()


_watch: HangWatch | None = None


def report_hangs(seconds: float, *, end: bool = False) -> HangWatch:
    """Report hangs once the program has imported JAX, unless this process does so already."""
    global _watch
    if _watch is None:
        _watch = HangWatch(seconds, end=end)
        OnImport("jax", _watch._shield(_watch.start))
    return _watch
