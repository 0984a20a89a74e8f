"""One profile of a given number of runs, recorded by all processes at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import jax

from jaxcoll._compat.coordination import Store, StoreUnreachableError, store
from jaxcoll._compat.running import ProfilerSession
from jaxcoll._observe.profile import BUSY
from jaxcoll._watch.compilations import Compilations

_QUIET_SECONDS = 1.0  # to wait after the last compilation
_PROBES = (0.25, 1.0, 4.0)  # seconds of the short profiles that estimate the step time
_LONGEST_SECONDS, _MOST_EVENTS = 60.0, 200_000
_POLL_SECONDS = 0.05

EARLY = "not measured: the program ended within a second or two of its last compilation."
ABSENT = (
    "not measured: no program with collectives ran from start to end while the profile was open."
)


class Window(threading.Thread):
    """A thread that records one profile, a second after the last compilation.

    Rank 0 estimates the step time and tells the other ranks when to begin. The profile is long
    enough for `runs` runs, but at most about a minute. The program's own profiles have priority:
    when it starts one, this one ends (from Python 3.12 on). All processes use the same `name`.
    """

    def __init__(
        self, compilations: Compilations, runs: int, name: str, *, with_programs: bool
    ) -> None:
        super().__init__(name="jaxcoll-profile", daemon=True)
        self.profile = self.probe = b""
        self.note = EARLY
        self._compilations, self._runs, self._key = compilations, runs, name
        self._with_programs = with_programs
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._session: ProfilerSession | None = None

    def start(self) -> None:
        """Start the thread."""
        self._compilations.calls.on_enter(jax.profiler.start_trace, lambda: self.close(BUSY))
        super().start()

    def close(self, note: str = "") -> None:
        """End the open profile, if any, and open no other one."""
        self._over.set()
        with self._lock:
            if self._session is not None:
                self.profile, self._session = self._session.stop(), None
                self.note = note or EARLY if self.profile else BUSY
            elif not self.profile:
                self.profile, self.note = self.probe, note or self.note or EARLY

    def run(self) -> None:
        """Wait for the last compilation and for rank 0's signal, then record the profile."""
        if not self._until(lambda: bool(self._compilations)):
            return
        try:
            self._open(self._seconds(store()))
        except StoreUnreachableError:
            self.note = "not measured: the coordinator does not answer."

    def _seconds(self, keys: Store | None) -> float | None:
        if keys is not None and keys.process:
            if self._until(lambda: keys.try_get(self._key) is not None):
                return float(keys.get(self._key, 1.0))
            return None
        pause = _QUIET_SECONDS
        while not (probed := self._probe(pause)):
            if self._over.is_set():
                return None
            pause = min(2 * pause, _LONGEST_SECONDS)
        seconds, events, runs = probed
        self._over.wait(seconds)  # between two profiles: gives the step time without the profiler
        wanted = _LONGEST_SECONDS
        if runs > 2:
            # A profile cuts off its first and last run; other ranks begin a poll or two later.
            wanted = seconds * (self._runs + 2) / runs + 2 * _POLL_SECONDS
        seconds = min(wanted, seconds * _MOST_EVENTS / events, _LONGEST_SECONDS)
        if keys is not None:
            keys.set(self._key, str(seconds))
        return seconds

    def _probe(self, pause: float) -> tuple[float, int, int] | None:
        """Return a short profile's seconds, events, and runs of communicating programs.

        None if no such program ran: it may wait for data, or another program is compiling.
        """
        from jaxcoll._observe.programs import count_runs

        began, seconds, runs, events = time.monotonic(), 0.0, 0, 0
        self._until(lambda: time.monotonic() - max(self._compilations.at, began) > pause)
        for seconds in _PROBES:
            if not self._open(seconds):
                self._over.set()
                return None
            self.probe, self.profile = self.profile, b""
            events, runs = count_runs(self.probe, self._compilations.programs())
            if runs > 2 or 4 * events > _MOST_EVENTS:
                break
        return (seconds, events, runs) if runs else None

    def _open(self, seconds: float | None) -> bool:
        """Record a profile; False if the program ended before, or has its own profile open."""
        with self._lock:
            if seconds is None or self._over.is_set():
                return False
            self._session = ProfilerSession(with_programs=self._with_programs)
        self._over.wait(seconds)
        with self._lock:
            if self._session is not None:
                self.profile, self._session = self._session.stop(), None
                self.note = "" if self.profile else BUSY
        return bool(self.profile) and not self._over.is_set()

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition is true; False if the program ended before."""
        while not condition():
            if self._over.wait(_POLL_SECONDS):
                return False
        return not self._over.is_set()
