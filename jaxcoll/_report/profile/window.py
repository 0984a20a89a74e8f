"""One profile of a given number of runs, recorded by all processes at the same time."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable

from jaxcoll._compat.coordination import Store, StoreUnreachableError, store
from jaxcoll._compat.running import ProfilerSession, call_before_profiles
from jaxcoll._report.profile.compilations import Compilations
from jaxcoll._report.profile.profile import BUSY
from jaxcoll._report.profile.shield import Shield

_QUIET_SECONDS = 1.0  # to wait after the last compilation
_PROBES = (0.25, 1.0, 4.0)  # seconds of the short profiles that estimate the step time
_LONGEST_SECONDS, _MOST_EVENTS = 30.0, 60_000
_POLL_SECONDS = 0.05
_MOST_CALLS = 600  # of jitted functions while a profile is open; each may have 200 events

_SHARE = 0.05
"""The share of the process's CPU time, or of all time if longer, that short profiles may take."""
_RECORDING = 2e-8
"""Seconds of CPU time that it takes to record a byte of a profile; an event has about 60 bytes."""

EARLY = "not measured: the {} ended while the profile waited for {}."
_QUIET = "a second without a compilation"
_RUN = "a run of a program with collectives"
_FREE = f"short profiles to have taken less than {_SHARE:.0%} of its time"
_LAST = "the other ranks"
ABSENT = (
    "not measured: no program with collectives ran from start to end while the profile was open."
)


class Window(threading.Thread):
    """A thread that records one profile, a second after the last compilation.

    Rank 0 estimates the step time by short profiles, and tells the other ranks when to begin. The
    profile is long enough for `runs` runs, but at most about a minute. The program's own profiles
    have priority: when it starts one, this one ends. All processes use the same `name`; `watched`
    is what they watch, in a word.
    """

    def __init__(
        self, compilations: Compilations, runs: int, name: str, watched: str, shield: Shield,
        *, with_programs: bool,
    ) -> None:  # fmt: skip
        super().__init__(target=shield(self._record), name="jaxcoll-profile", daemon=True)
        self.profile = b""
        self.note = ""
        self._probe_profile = b""
        self._watched, self._waits_for = watched, _RUN
        self._began = time.process_time(), time.monotonic()
        self._open_seconds = 0.0  # how long the last profile was open
        self._spent, self._rate = 0.0, 0.0  # CPU seconds of short profiles: all, and each second
        self._compilations, self._runs, self._key = compilations, runs, name
        self._with_programs = with_programs
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._session: ProfilerSession | None = None
        self._shield, self._undo = shield, lambda: None

    def start(self) -> None:
        self._undo = call_before_profiles(self._shield(self._give_way))
        super().start()

    def close(self, note: str = "") -> None:
        """End the open profile, if any, and open no other one."""
        self._undo()
        self._over.set()
        with self._lock:
            if self._session is not None:
                self.profile, self._session = self._session.stop(), None
                self.note = note or self._early() if self.profile else BUSY
            elif not self.profile:
                self.profile, self.note = self._probe_profile, note or self.note or self._early()

    def _give_way(self) -> None:
        self.close(BUSY)

    def _early(self) -> str:
        return EARLY.format(self._watched, self._waits_for)

    def _record(self) -> None:
        """Wait for the last compilation and for rank 0's signal, then record the profile."""
        if not self._until(lambda: bool(self._compilations.modules)):
            return
        try:
            self._open(self._seconds(store()))
        except StoreUnreachableError:
            self.note = "not measured: the coordinator does not answer."

    def _seconds(self, keys: Store | None) -> float | None:
        # Rank 0 chooses the length for all, so that their profiles have many runs in common.
        if keys is not None and keys.process:
            if self._until(lambda: keys.try_get(self._key) is not None):
                return float(keys.get(self._key, 1.0))
            return None
        pause = _QUIET_SECONDS
        while not (probed := self._probe(pause)):
            if self._over.is_set():
                return None
            pause = min(2 * pause, _LONGEST_SECONDS)
        seconds, _, runs = probed
        seconds = min(self._choose_length(*probed), 4 * seconds if runs > 2 else _LONGEST_SECONDS)
        self._waits_for = _LAST
        if keys is not None:
            keys.set(self._key, str(seconds))
        return seconds

    def _choose_length(self, seconds: float, events: int, runs: int) -> float:
        """Choose for how long to record, after a short profile that had so many runs and events."""
        wanted = _LONGEST_SECONDS
        if runs > 2:
            # A profile cuts off its first and last run; other ranks begin a poll or two later.
            wanted = seconds * (self._runs + 2) / runs + 2 * _POLL_SECONDS
        return min(wanted, _LONGEST_SECONDS, seconds * _MOST_EVENTS / max(events, 1))

    def _probe(self, pause: float) -> tuple[float, int, int] | None:
        """Open a short profile; returns its seconds, events, and runs of communicating programs.

        None if no such program ran: it may wait for data, or another program is compiling.
        """
        importlib.import_module("jaxcoll._report.programs")  # which is needed in any case
        began, seconds, runs, events = time.monotonic(), 0.0, 0, 0
        for longest in _PROBES:
            while not (self._is_quiet(began, pause) and self._is_affordable(longest)):
                if self._over.wait(_POLL_SECONDS):
                    return None
            cpu = time.thread_time()
            if not self._open(longest):
                self._over.set()
                return None
            seconds = self._open_seconds
            self._probe_profile, self.profile = self.profile, b""
            events, runs = self._count(self._probe_profile)
            cost = time.thread_time() - cpu + len(self._probe_profile) * _RECORDING
            self._spent, self._rate = self._spent + cost, cost / max(seconds, 1.0)
            # A phase of few events may end: a short profile tells little of a long one.
            if runs > 2 and self._choose_length(seconds, events, runs) <= 4 * seconds:
                break
            self._waits_for = _RUN
        return (seconds, events, runs) if runs else None

    def _count(self, profile: bytes) -> tuple[int, int]:
        """Count a short profile's events and runs; it is not read if no such program ran."""
        from jaxcoll._report.programs import count_runs

        names = [name.encode() for name in self._compilations.modules]
        if not any(name in profile for name in names):
            return 0, 0
        return count_runs(profile, self._compilations.programs())

    def _is_quiet(self, began: float, pause: float) -> bool:
        is_quiet = time.monotonic() - max(self._compilations.at, began) > pause
        self._waits_for = self._waits_for if is_quiet else _QUIET
        return is_quiet

    def _is_affordable(self, seconds: float) -> bool:
        """True if a profile of so many seconds is within what short profiles may take."""
        # A program that waits, for a device say, has time to spare.
        cpu, began = self._began
        taken = max(time.process_time() - cpu, time.monotonic() - began)
        is_affordable = self._spent + self._rate * seconds <= _SHARE * (taken - self._spent)
        self._waits_for = self._waits_for if is_affordable else _FREE
        return is_affordable

    def _open(self, seconds: float | None) -> bool:
        """Record a profile; False if the program ended before, or has its own profile open."""
        with self._lock:
            if seconds is None or self._over.is_set():
                return False
            self._session = ProfilerSession(with_programs=self._with_programs)
        # From Python 3.12 on, a phase that begins while it is open does not fill it.
        began = time.monotonic()
        until, most = began + seconds, self._compilations.calls.number + _MOST_CALLS
        while time.monotonic() < until and self._compilations.calls.number < most:
            if self._over.wait(min(_POLL_SECONDS, max(0.0, until - time.monotonic()))):
                break
        self._open_seconds = time.monotonic() - began
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
