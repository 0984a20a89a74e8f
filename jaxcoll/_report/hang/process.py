"""The row of one process of a job, and its part in reporting a hang."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque

import jax

from jaxcoll._compat.coordination import store
from jaxcoll._compat.settings import has_backend, read_option
from jaxcoll._job.stacks import Stacks, Thread, classify, has_main_ended, is_user, name_program
from jaxcoll._report.hang.judge import SHARE, Row, judge
from jaxcoll._report.hang.peers import ANSWER_SECONDS, HangPeers
from jaxcoll._report.hang.report import say, show_report
from jaxcoll._report.profile.calls import JITTED, Calls
from jaxcoll._report.profile.compilations import Compilations
from jaxcoll._report.profile.shield import Shield

_WAKES = 20  # in a second, of a thread that waits
_CALLS = 1000  # that a row has
_LONGEST_ERROR = 200  # characters
_WEIGHTS = {"callback": 3, "program": 2, "barrier": 2}


class HangProcess:
    """This process as the watcher sees it.

    Args:
      limit: seconds that it may wait for others.
      beat: seconds between two calls of `beat`.
      calls: those of this process.
      shield: notes what fails.
    """

    def __init__(self, limit: float, beat: float, calls: Calls, shield: Shield) -> None:
        self.peers: HangPeers | None = None
        self._limit, self._beat = limit, beat
        self._stacks, self._calls, self._shield = Stacks(), calls, shield
        self._compilations = Compilations(shield, calls, only_new=False)
        self._used: deque[tuple[float, float]] = deque(maxlen=2 + int(limit / beat))
        self._waits_cpu = 0.0  # seconds that the threads used which may wait
        self._devices, self._shows_computing = 0, False
        self._patience, self._waited = limit, 0.0
        self._told: list[int] | None = None  # who was missing in the last report

    def beat(self, now: float) -> bool:
        """Look once, and take part in a report; returns True if this process reported a hang."""
        if self.peers is None or not self.peers.keys.is_current():
            self._join()
        self._compilations.look()
        row = self._measure(now)
        if self.peers is None:
            return False
        if row.waited < min(self._waited, self._limit / 2):
            self._go_on()
        self._waited = row.waited
        is_asked = self.peers.tell(row)
        if is_asked or row.has_waited(self._patience):
            return self._take_part(self.peers, row, now)
        return False

    def close(self) -> None:
        """Leave the job."""
        if self.peers is not None:
            self._go_on()
            self.peers.close()

    def _go_on(self) -> None:
        if self._told is not None and self.peers is not None:
            say(f"process {self.peers.rank} went on, after {self._waited:.1f} s.")
        self._patience, self._told = self._limit, None

    def _join(self) -> None:
        """Begin to exchange rows, once this process has joined a job of several."""
        # A request of a client that is not connected ends the process (JAX 0.12). That it has made
        # devices shows that it is connected.
        if has_backend() and (keys := store()) is not None and keys.processes > 1:
            with contextlib.suppress(TimeoutError, OSError):
                self.peers = HangPeers(keys, self._beat)

    def _take_part(self, peers: HangPeers, row: Row, now: float) -> bool:
        """Answer the question, and report if this is the first of the processes that wait."""
        peers.write_stacks()
        least, began = SHARE * self._limit, time.monotonic()
        until = began + ANSWER_SECONDS + self._beat if row.has_waited(least) else 0.0
        rows = peers.answer(row, until)
        if row.waited:
            self._patience *= 2
        waiting = [rank for rank, answer in rows.items() if answer.has_waited(least)]
        if peers.rank != min(waiting, default=-1):
            return False
        if self._measure(now + time.monotonic() - began).seconds < row.waited:
            return False  # it went on meanwhile
        rows = {r: rows.get(r) or peers.examine(r) for r in range(peers.size)}
        verdict = judge(rows, self._limit)
        if verdict is None:
            self._patience = 1.25 * row.waited
            return False
        again, self._told = self._told == verdict.missing, verdict.missing
        lines = [*show_report(verdict, rows, self._describe(verdict.program))]
        peers.write_report(
            {
                "verdict": dataclasses.asdict(verdict),
                "rows": {r: dataclasses.asdict(each) for r, each in rows.items()},
                "notes": self._shield.notes,
            }
        )
        files = f"  stacks of all threads, and a report: {peers.folder}"
        say(*lines[:1] if again else [*lines, files])
        return True

    def _measure(self, now: float) -> Row:
        """Look at all threads, and say where this process is."""
        # Some waits wake up five times a second, to look for signals, or more often if others have
        # the GIL. Without counts of calls, only CPU time tells them from a loop of programs.
        is_known = self._calls.are_all or self._shows_computing
        threads = self._stacks.look(now, self._calls.by_thread, wakes=_WAKES * is_known)
        thread, kind, program = self._choose(threads, now)
        seconds, ended = now - thread.since[0], None
        self._waits_cpu += thread.cpu
        if has_main_ended(threads):
            ended = _show_error()
            kind = kind if kind in ("shutdown", "exit") else "ended"
        elif has_backend():
            # Other devices compute unseen, and a process that waits in MPI computes too.
            over_mpi = read_option("cpu_collectives_implementation") == "mpi"
            self._shows_computing = jax.default_backend() == "cpu" and not over_mpi
            self._devices = jax.device_count()
        where = thread.show_places(now) or threads[0].show_places(now)
        if kind == "python":  # another thread may be the one that runs programs
            others = [t for t in threads if t is not thread and now - t.since[0] > self._limit / 3]
            where[2:2] = [
                [*place[:2], f"{place[2]} (thread {t.name})", *place[3:]]
                for t in others
                for place in t.show_places(now)[:1]
            ]
        order = [*self._calls.order][-_CALLS:] if self._calls.are_all else []
        programs = {name_program(m): n for m, n in self._compilations.modules.items()}
        mixed = sorted({*map(name_program, self._compilations.quiet_modules)} & programs.keys())
        if kind == "program" and program is None:
            possible = [name for name in order if name in programs][-1:] or [*programs]
            program = possible[0] if len(possible) == 1 and possible[0] not in mixed else None
        return Row(
            self.peers.rank if self.peers else 0, kind, round(seconds, 1), program, where,
            self._shows_computing * self._compute_share(now, seconds), ended,
            dict(self._calls.counts) if self._calls.are_all else None, order, programs,
            self._devices, os.getpid(),
            [threading.get_native_id(), threading.main_thread().ident or 0],
            socket.gethostname(), time.time(), mixed=mixed,
        )  # fmt: skip

    def _choose(self, threads: list[Thread], now: float) -> tuple[Thread, str, str | None]:
        """Choose the thread that has waited longest in JAX, or the main one."""
        best = None
        for thread in threads:
            seconds = now - thread.since[0]
            stuck = seconds > self._limit / 3 or not thread.frames
            kind, program = "python", None
            if stuck or thread.is_main:
                kind, program = classify(thread, JITTED)
            weight = (_WEIGHTS.get(kind, 0) * stuck, thread.is_main, seconds)
            if best is None or weight > best[0]:
                best = weight, (thread, kind, program)
        assert best is not None  # there is always a main thread
        return best[1]

    def _compute_share(self, now: float, seconds: float) -> float:
        """Compute how many cores this process has used where it stands, within the limit."""
        # A program computes in its caller's thread or in native ones. The program's other threads
        # of Python, which may load data, do not show whether it waits.
        self._used.append((now, time.process_time() - self._stacks.cpu + self._waits_cpu))
        # Not what it computed before it came to where it stands, such as the compilation of the
        # program that it waits in. One that calls programs in a loop stands nowhere: it has
        # computed since the last look.
        latest = self._used[max(len(self._used) - 2, 0)][0]
        begin = min(now - min(seconds, self._limit), latest)
        since = [used for used in self._used if used[0] >= begin]
        (t0, cpu0), (t1, cpu1) = since[0], since[-1]
        return round((cpu1 - cpu0) / max(t1 - t0, 1e-9), 3)

    def _describe(self, program: str | None) -> str:
        from jaxcoll._runtime.fingerprint import describe_first

        text = self._compilations.find_text(lambda module: name_program(module) == program)
        return describe_first(text, f"`{program}`") if text else ""


def _show_error() -> str:
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user(f.filename)]
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = str(error)[:_LONGEST_ERROR].partition("\n")[0]
    return f"{type(error).__name__}{place}: {text}"
