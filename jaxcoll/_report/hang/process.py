"""What one process of a job is doing, and its part in reporting a hang."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
import time
import traceback
from collections import deque

import jax

from jaxcoll._compat.coordination import store
from jaxcoll._compat.settings import has_backend
from jaxcoll._job.stacks import Stacks, Thread, classify, has_main_ended, is_user, name_program
from jaxcoll._report.hang.peers import ANSWER_SECONDS, HangPeers
from jaxcoll._report.hang.report import WAITS, Row, judge, report, say
from jaxcoll._report.profile.calls import JITTED, Calls
from jaxcoll._report.profile.compilations import Compilations
from jaxcoll._report.profile.shield import Shield

_WAKES = 20  # in a second, of a thread that waits
_CALLS = 1000  # that a row has
_LONGEST_ERROR = 200  # characters
_WEIGHTS = {"callback": 3, "program": 2, "barrier": 2}
_HEAD = re.compile(r"HloModule ([^,\s]+)")
_DEVICES = re.compile(r"num_(?:partitions|replicas)=(\d+)")


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
        self._devices, self._platform = 0, ""
        self._question, self._patience, self._waited = 0, limit, 0.0
        self._told: list[int] | None = None  # who was missing in the last report

    def beat(self, now: float) -> bool:
        """Look once, and take part in a report; returns True if this process reported a hang."""
        threads = self._look(now)
        if self.peers is None or not self.peers.keys.is_current():
            self._join()
        self._compilations.look()
        if (peers := self.peers) is None:
            return False
        is_asked = bool(peers.exchange(self._question, None))
        row = self._row(threads, now, is_asked=is_asked)
        waits = row.seconds if row.kind in (*WAITS, "shutdown") else 0.0
        if waits < min(self._waited, self._limit / 2):
            if self._told is not None:
                say(f"process {peers.rank} went on, after {self._waited:.1f} s.")
            self._patience, self._told = self._limit, None
        self._waited = waits
        peers.tell_host(dataclasses.asdict(row))
        if is_asked or waits >= self._patience:
            return self._take_part(peers, row, waits, now)
        return False

    def _look(self, now: float) -> list[Thread]:
        # Some waits wake up five times a second, to look for signals, or more often if others have
        # the GIL. Without counts of calls, only CPU time tells them from a loop of programs.
        is_known = self._calls.are_all or self._platform == "cpu"
        return self._stacks.look(now, self._calls.by_thread, wakes=_WAKES * is_known)

    def close(self) -> None:
        """Leave the job."""
        if self.peers is not None:
            if self._told is not None:
                say(f"process {self.peers.rank} went on, after {self._waited:.1f} s.")
            self.peers.close()

    def _join(self) -> None:
        """Begin to exchange rows, once this process has joined a job of several."""
        # A request of a client that is not connected ends the process (JAX 0.12). That it has made
        # devices shows that it is connected.
        if has_backend() and (keys := store()) is not None and keys.processes > 1:
            with contextlib.suppress(TimeoutError, OSError):
                self.peers, self._question = HangPeers(keys, self._beat), 0

    def _take_part(self, peers: HangPeers, row: Row, waits: float, now: float) -> bool:
        """Answer the question, and report if this is the first of the processes that wait."""
        texts = self._complete(row)
        peers.write_stacks()
        least, began = 0.7 * self._limit, time.monotonic()
        until = time.monotonic() + ANSWER_SECONDS + 2 * self._beat if waits >= least else 0.0
        answers = peers.exchange(self._question, dataclasses.asdict(row), until)
        self._question += 1
        if waits:
            self._patience *= 2
        waiting = [
            rank
            for rank, answer in answers.items()
            if answer["kind"] in (*WAITS, "shutdown") and answer["seconds"] >= least
        ]
        if peers.rank != min(waiting, default=-1):
            return False
        now += time.monotonic() - began
        if self._row(self._look(now), now, is_asked=False).seconds < waits:
            return False  # it went on meanwhile
        rows = {r: Row(**(answers.get(r) or peers.last_word(r))) for r in range(peers.size)}
        verdict = judge(rows, self._limit)
        if verdict is None:
            self._patience = 1.25 * waits
            return False
        again, self._told = self._told == verdict.missing, verdict.missing
        text = texts.get(verdict.program or "", "")
        lines = [*report(verdict, rows, _describe(text, verdict.program))]
        folder = peers.write_report(
            {"verdict": dataclasses.asdict(verdict), "rows": answers, "notes": self._shield.notes}
        )
        say(*lines[:1] if again else [*lines, f"  stacks of all threads, and a report: {folder}"])
        return True

    def _row(self, threads: list[Thread], now: float, *, is_asked: bool) -> Row:
        """Say where this process is: its thread that has waited longest in JAX, or its main one."""
        self._used.append((now, time.process_time() - time.thread_time()))
        found: list[tuple[tuple[float, bool, float], str, str | None, Thread]] = []
        for thread in threads:
            seconds = now - thread.since[0]
            stuck = seconds > self._limit / 3 or not thread.frames
            kind, program = "python", None
            if stuck or (thread.is_main and (is_asked or seconds > 0)):
                kind, program = classify(thread, JITTED)
            weight = _WEIGHTS.get(kind, 0) * stuck
            found.append(((weight, thread.is_main, seconds), kind, program, thread))
        (_, _, seconds), kind, program, thread = max(found, key=lambda f: f[0])
        ended = None
        if has_main_ended(threads):
            ended = _error()
            kind = kind if kind in ("shutdown", "exit") else "ended"
        elif has_backend():
            self._devices, self._platform = jax.device_count(), jax.default_backend()
        full = is_asked or seconds > self._limit / 3
        where = thread.places(now, with_calls=full) or threads[0].places(now, with_calls=full)
        if kind == "python" and full:  # another thread may be the one that runs programs
            others = [t for t in threads if t is not thread and now - t.since[0] > self._limit / 3]
            of_others = [p for t in others for p in t.places(now, with_calls=True)[:1]]
            where = [*where[:2], *of_others, *where[2:]]
        # Not what it computed before: the compilation of the program that it waits in.
        since = [used for used in self._used if used[0] >= now - seconds]
        (t0, cpu0), (t1, cpu1) = since[0], since[-1]
        return Row(
            self.peers.rank if self.peers else 0, kind, round(seconds, 1), program,
            where, round((cpu1 - cpu0) / max(t1 - t0, 1e-9), 3), ended,
            devices=self._devices, platform=self._platform, pid=os.getpid(),
            host=socket.gethostname(),
        )  # fmt: skip

    def _complete(self, row: Row) -> dict[str, str]:
        """Add calls and programs to a row; returns the texts of the programs by their names."""
        texts = {_name(program.text): program.text for program in self._compilations.programs()}
        row.programs = {
            name: max(map(int, _DEVICES.findall(text.partition("\n")[0])), default=1)
            for name, text in texts.items()
        }
        if self._calls.are_all:
            row.order = list(self._calls.order)[-_CALLS:]
            row.calls = dict(self._calls.counts)
        if row.kind == "program" and row.program is None:
            possible = [name for name in row.order if name in texts] or [*texts] * (len(texts) == 1)
            row.program = possible[-1] if possible else None
        return texts


def _name(text: str) -> str:
    head = _HEAD.match(text)
    return name_program(head[1]) if head else "?"


def _describe(text: str, name: str | None) -> str:
    from jaxcoll._runtime.fingerprint import describe_first

    return describe_first(text, f"`{name}`") if text else ""


def _error() -> str:
    """Return the uncaught exception that ended the program, and its line."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user(f.filename)]
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = str(error)[:_LONGEST_ERROR].partition("\n")[0]
    return f"{type(error).__name__}{place}: {text}"
