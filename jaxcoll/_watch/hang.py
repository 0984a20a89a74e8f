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

from jaxcoll._cluster.stacks import OURS
from jaxcoll._watch.hang_report import say

EXIT_STATUS = 124
"""The exit status of a program that is ended because it hangs, as `timeout` has."""

_POLL_SECONDS = 0.02
_LONGEST_BEAT = 0.5
_MOST_FAILURES = 10  # in a row: a thread may change while it is looked at
_LONGEST_PAUSE = 1.0  # of this thread on a loaded machine
_END_SECONDS = 2.0


class HangWatch(threading.Thread):
    """A thread that looks where this process is, and reports hangs of its job.

    Nothing that it does can raise into the program.

    Args:
      seconds: how long a process may wait for others.
      end: end this process after its report, with `EXIT_STATUS`.
    """

    def __init__(self, seconds: float, *, end: bool = False) -> None:
        super().__init__(name=f"{OURS}hang", daemon=True)
        self._limit, self._end = seconds, end
        self._over, self._process = threading.Event(), os.getpid()
        self._here: Any = None  # its class is imported after JAX

    def start(self) -> None:
        """Start the thread. If it comes before JAX, the exit of the program is watched as well."""
        atexit.register(self.close)  # Python calls it after what is registered later
        super().start()

    def run(self) -> None:
        """Look again and again, once the program has imported JAX."""
        try:
            while not has_imported_jax():
                if self._over.wait(_POLL_SECONDS):
                    return
            from jaxcoll._watch.call_log import CallLog

            log, beat = CallLog(), min(_LONGEST_BEAT, self._limit / 10)
            log.start()

            from jaxcoll._watch.hang_process import HangProcess

            self._here = HangProcess(self._limit, beat, log)
            now, failures = time.monotonic(), 0
            before = now
            while not self._over.wait(beat):
                # While the process was suspended, it did not wait.
                passed = time.monotonic() - before
                before += passed
                now += min(passed, 2 * beat + _LONGEST_PAUSE)
                try:
                    if self._here.beat(now) and self._end:
                        os._exit(EXIT_STATUS)
                    failures = 0
                except Exception:
                    failures += 1
                    if failures == _MOST_FAILURES:
                        raise
        except Exception as error:
            if not self._over.is_set():
                say(f"hangs are no longer reported: {type(error).__name__}: {error}")

    def is_alone(self) -> bool:
        """Return whether this process has joined no job of several processes."""
        return self._here is None or self._here.peers is None

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if os.getpid() == self._process and self._here is not None:
            self.join(_END_SECONDS)
            self._here.close()


def has_imported_jax() -> bool:
    """Return whether this process has imported JAX, to the end."""
    spec = getattr(sys.modules.get("jax"), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


_watch: HangWatch | None = None


def report_hangs(seconds: float, *, end: bool = False) -> HangWatch:
    """Start to report hangs, unless this process does so already."""
    global _watch
    if _watch is None:
        _watch = HangWatch(seconds, end=end)
        _watch.start()
    return _watch
