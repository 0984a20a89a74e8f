"""Processes agree on the program of a call before any of its data moves.

Each writes the mark of its program; the first process of the group reads all of them and writes
the verdict, which the others wait for. That is two messages a process, and three for the first,
whatever their number. The lines of a program travel only where marks differ: their processes'
watchdogs are asked for them.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import HEARTBEAT_SECONDS, SILENT_CALLER_SECONDS
from jaxcoll._dispatch.executable import Program
from jaxcoll._dispatch.fingerprint import first_difference, unpacked
from jaxcoll._dispatch.peers import Peers
from jaxcoll._errors import (
    PeerLostError,
    ProgramMismatchError,
    ReplicaDivergenceError,
    SameRowsWarning,
)

PATIENCE_SECONDS = 0.25
"""How long a mark is waited for before its process is asked what it does instead."""

_DETAIL_SECONDS = 10.0  # how long the lines of another process, and its digests, are waited for

_MISMATCH = """\
Processes are about to run different programs as call {position}; {done}. The first difference:
{sides}
Every process has to make the same calls in the same order: the same function, with arguments of \
the same structure, names, shapes and dtypes, the same constants and the same options, under the \
same version of JAX, its settings and `XLA_FLAGS`, and on the same kind of processor."""

_DIFFERENT = """\
{name}: processes hold different values in {n} of {of} leaves that every replica gets whole, \
{leaf} first: processes {groups}. Nothing was run. Make them from one seed, or read them from \
one file, on every process; what is meant to differ is a batch, or a `PerReplica`."""

_SAME_ROWS = """\
{name}: all {n} processes pass the same rows in {leaf}. Each process passes its own share of the \
batch, so that these rows count {n} times; if this is the whole batch, pass this process's part \
of it, as in `rows[jax.process_index()::jax.process_count()]`."""


class Agreement:
    """How the processes of one group, by its name, agree on the programs of their calls."""

    def __init__(self, peers: Peers, group: str, processes: Sequence[int]) -> None:
        self._peers, self._group, self._processes = peers, group, processes
        self._last_folder = ""

    def reached(self, position: int, program: Program) -> tuple[Exception | None, bool]:
        """Wait until all processes are about to run the same program.

        Returns:
          None where they are; or the error that all of them raise. And whether others have run.

        Raises:
          PeerLostError: a process does not come any more.
        """
        peers, first = self._peers, program.first
        folder = f"{peers.root}/agree/{self._group}/{position}"
        own = [program.mark, *(first.short() if first is not None else ("", ""))]
        peers.store.set(f"{folder}/marks/{peers.process}", json.dumps(own))
        inquiry = _Inquiry(peers, self._group, position, program)
        if peers.process != self._processes[0]:
            verdict = self._awaited(f"{folder}/verdict", inquiry)
        else:
            verdict = self._verdict(f"{folder}/marks", inquiry)
            peers.store.set(f"{folder}/verdict", json.dumps(verdict))
            if "error" not in verdict:  # all are here, and so have read the verdict before this one
                if self._last_folder:
                    peers.store.delete(self._last_folder)
                self._last_folder = folder
        if "divergent" in verdict:
            groups = tuple(map(tuple, verdict["groups"]))
            divergent = dict.fromkeys(verdict["divergent"], groups)
            return ReplicaDivergenceError(verdict["error"], divergent=divergent), False
        if "error" in verdict:
            return ProgramMismatchError(verdict["error"]), verdict["is_run"]
        if "same_rows" in verdict and first is not None:
            leaf, n = next(iter(first.rows)), len(self._processes)
            text = _SAME_ROWS.format(name=program.name, n=n, leaf=leaf)
            warnings.warn(text, SameRowsWarning, stacklevel=2)
        return None, False

    def _verdict(self, folder: str, inquiry: _Inquiry) -> dict[str, Any]:
        """What the marks of all processes say, as far as it takes to know."""
        pause = 0.001
        while True:
            marks = self._peers.store.all(folder)
            entries = {int(p): json.loads(text) for p, text in marks.items()}
            differing = [p for p in sorted(entries) if entries[p][0] != inquiry.program.mark]
            missing = [p for p in self._processes if p not in entries and p not in inquiry.alike]
            if differing:
                return inquiry.mismatch(differing[0], inquiry.ran(missing))
            if not missing:
                return self._of_values(entries, inquiry)
            if (other := inquiry.stray(missing)) is not None:
                return inquiry.mismatch(other, [other])
            time.sleep(pause)  # short at first: as a rule all arrive within milliseconds
            pause = min(2 * pause, 0.05)

    def _awaited(self, key: str, inquiry: _Inquiry) -> dict[str, Any]:
        """The verdict of the first process; or this process's own, if that does not come."""
        first = self._processes[0]
        while True:
            try:
                return json.loads(self._peers.store.get(key, PATIENCE_SECONDS))
            except TimeoutError:
                if inquiry.stray([first]) is not None:
                    return inquiry.mismatch(first, [first])
                if inquiry.alike:
                    return {}

    def _of_values(self, entries: Mapping[int, Sequence[str]], inquiry: _Inquiry) -> dict[str, Any]:
        """What the digests of the processes' first arguments say."""
        groups: dict[str, list[int]] = {}
        for process in sorted(entries):
            if entries[process][1]:
                groups.setdefault(entries[process][1], []).append(process)
        if len(groups) > 1:
            largest = sorted(groups.values(), key=len, reverse=True)
            sides = inquiry.details([group[0] for group in largest[:2]])
            one, other = (side.get("leaves", {}) for side in sides.values())
            paths = [path for path in one | other if one.get(path) != other.get(path)]
            named = [[*map(str, group)] for group in largest]
            text = _DIFFERENT.format(
                name=inquiry.program.name,
                n=len(paths),
                of=len(one),
                leaf=paths[0],
                groups=" | ".join(map(", ".join, named)),
            )
            return {"error": text, "divergent": paths, "groups": named}
        rows, n = {entry[2] for entry in entries.values()}, len(self._processes)
        same = len(entries) == n > 1 and len(rows) == 1 and rows != {""}
        return {"same_rows": True} if same else {}


class _Inquiry:
    """Asks processes that do not come, at growing intervals, what they do instead."""

    def __init__(self, peers: Peers, group: str, position: int, program: Program) -> None:
        self.program = program
        # Those that run the same program here, and saw nothing to agree upon
        self.alike: set[int] = set()
        self._peers, self._group, self._position = peers, group, position
        self._silent_since: dict[int, float] = {}
        self._wait = PATIENCE_SECONDS
        self._next = time.monotonic() + self._wait

    def stray(self, missing: Sequence[int]) -> int | None:
        """A process that runs something else in the place of this call; None: none is known to.

        Raises:
          PeerLostError: one has ended; or, where no connection reports that, has not answered for
            long.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        replies = self._peers.ask(self._group, self._position, missing)
        self._wait = min(2 * self._wait, 2 * HEARTBEAT_SECONDS)
        self._next = time.monotonic() + self._wait
        lost = [p for p in missing if p not in replies and self._is_lost(p, now)]
        if lost:
            raise PeerLostError("it did not come to agree upon the next program.", ranks=lost)
        for process in replies:
            self._silent_since.pop(process, None)
        # A process that has not run anything here is about to write its mark.
        ran = {p: reply["ran"] for p, reply in replies.items() if reply.get("ran") is not None}
        self.alike |= {p for p, mark in ran.items() if mark == self.program.mark}
        return min(ran.keys() - self.alike, default=None)

    def ran(self, missing: Sequence[int]) -> list[int]:
        """Those that saw nothing to agree upon, and run what they expected here."""
        replies = self._peers.ask(self._group, self._position, missing) if missing else {}
        return sorted(p for p, reply in replies.items() if reply.get("ran") is not None)

    def _is_lost(self, process: int, now: float) -> bool:
        state = self._peers.known(process)
        silent = now - self._silent_since.setdefault(process, now) >= SILENT_CALLER_SECONDS
        return state in ("ended", "dead") or (state == "here" and silent and followed() is None)

    def details(self, processes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What each of these processes is about to run, and the digests of its arguments."""
        me, first = self._peers.process, self.program.first
        own = {"lines": self.program.lines, "leaves": first.replicated if first else {}}
        others = [p for p in processes if p != me]
        replies = self._peers.ask(self._group, self._position, others, _DETAIL_SECONDS, detail=True)
        return {p: own if p == me else replies.get(p, {}) for p in processes}

    def mismatch(self, other: int, ran: Sequence[int]) -> dict[str, Any]:
        """The verdict that this process and another bring different programs."""
        sides = self.details(sorted((self._peers.process, other)))
        lines = {
            p: unpacked(side["lines"]) if side.get("lines") else ["(its program is not known)"]
            for p, side in sides.items()
        }
        done = f"process {ran[0]} runs one and waits in it" if ran else "nothing was run"
        difference = first_difference(lines)
        text = _MISMATCH.format(position=self._position, done=done, sides=difference)
        return {"error": text, "is_run": bool(ran)}
