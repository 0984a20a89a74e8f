"""Processes agree on the program of a call before any of its data moves.

Each writes the mark of its program; the first process of the group reads all of them and writes
the verdict, which the others wait for. That is two messages a process, and three for the first,
whatever their number. The lines of a program travel only where marks differ: its process's
watchdog is asked for them.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import HEARTBEAT_SECONDS, SILENT_CALLER_SECONDS
from jaxcoll._dispatch.executable import Program
from jaxcoll._dispatch.fingerprint import FirstValues, first_difference, unpacked
from jaxcoll._dispatch.peers import Peers
from jaxcoll._spmd.check_replicas import ReplicaCheck
from jaxcoll.errors import PeerLostError, ProgramMismatchError, ReplicaDivergenceError

PATIENCE_SECONDS = 0.25
"""Seconds for which a mark is waited for before its process is asked what it does instead."""

_LINES_SECONDS = 10.0  # how long the lines of another process are waited for

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


@dataclasses.dataclass(eq=False)
class Agreement:
    """The protocol by which a group's processes agree on the program of one call."""

    peers: Peers
    group: str
    processes: Sequence[int]
    position: int
    program: Program
    first: FirstValues | None  # what this process brings to its first run; None: nothing
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self.folder = f"{self.peers.root}/agree/{self.group}/{self.position}"
        # Processes that run the same program here, and saw nothing to agree upon
        self._alike: set[int] = set()
        self._silent_since: dict[int, float] = {}
        self._pause, self._next = PATIENCE_SECONDS, time.monotonic() + PATIENCE_SECONDS

    def reach(self) -> tuple[Exception | None, bool]:
        """Wait until all processes are about to run the same program.

        Returns:
          None where they are; or the error that all of them raise. And whether others have run.

        Raises:
          PeerLostError: a process does not come any more.
        """
        store, me, first = self.peers.store, self.peers.process, self.first
        whole, rows = ("", "") if first is None else first.short()
        if first is not None:
            store.set(f"{self.folder}/values/{me}", json.dumps(first.replicated))
        store.set(f"{self.folder}/marks/{me}", json.dumps([self.program.mark, whole, rows]))
        if me == self.processes[0]:
            verdict = self._verdict()
            store.set(f"{self.folder}/verdict", json.dumps(verdict))
        else:
            verdict = self._awaited()
        if "divergent" in verdict:
            groups = {leaf: tuple(map(tuple, of)) for leaf, of in verdict["divergent"].items()}
            return ReplicaDivergenceError(verdict["error"], divergent=groups), False
        if "error" in verdict:
            return ProgramMismatchError(verdict["error"]), verdict["is_run"]
        if "same_rows" in verdict and first is not None:
            leaf, n = next(iter(first.rows)), len(self.processes)
            self.warn(_SAME_ROWS.format(name=self.program.name, n=n, leaf=leaf))
        return None, False

    def _verdict(self) -> dict[str, Any]:
        """Return the verdict of all processes' marks, as far as it takes to know."""
        pause = 0.001
        while True:
            marks = self.peers.store.all(f"{self.folder}/marks")
            entries = {int(p): json.loads(text) for p, text in marks.items()}
            differing = [p for p in sorted(entries) if entries[p][0] != self.program.mark]
            missing = [p for p in self.processes if p not in entries and p not in self._alike]
            if differing:
                replies = self.peers.ask(self.group, self.position, missing) if missing else {}
                ran = [p for p in sorted(replies) if replies[p].get("ran") is not None]
                return self._mismatch(differing[0], ran)
            if not missing:
                return self._of_values(entries)
            if (stray := self._stray(missing)) is not None:
                return self._mismatch(stray, [stray])
            time.sleep(pause)  # short at first: as a rule all arrive within milliseconds
            pause = min(2 * pause, 0.05)

    def _awaited(self) -> dict[str, Any]:
        """The verdict of the first process; or this process's own, if that does not come."""
        first = self.processes[0]
        while True:
            try:
                return json.loads(self.peers.store.get(f"{self.folder}/verdict", PATIENCE_SECONDS))
            except TimeoutError:
                if self._stray([first]) is not None:
                    return self._mismatch(first, [first])
                if self._alike:
                    return {}

    def _of_values(self, entries: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        """Return the verdict of the digests of the processes' first arguments."""
        if len({whole for _, whole, _ in entries.values()} - {""}) > 1:
            texts = self.peers.store.all(f"{self.folder}/values")
            values = {p: json.loads(texts[p]) for p in sorted(texts, key=int)}
            found = divergent(values)
            leaf, groups = next(iter(found.items()))
            text = _DIFFERENT.format(
                name=self.program.name,
                n=len(found),
                of=len(next(iter(values.values()))),
                leaf=leaf,
                groups=" | ".join(map(", ".join, groups)),
            )
            return {"error": text, "divergent": found}
        rows, n = {rows for _, _, rows in entries.values()}, len(self.processes)
        same = len(entries) == n > 1 and len(rows) == 1 and rows != {""}
        return {"same_rows": True} if same else {}

    def _stray(self, missing: Sequence[int]) -> int | None:
        """A process that runs something else in the place of this call; None: none is known to.

        Those that do not come are asked at growing intervals.

        Raises:
          PeerLostError: one has ended; or, where no connection reports that, has not answered for
            long.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        replies = self.peers.ask(self.group, self.position, missing)
        self._pause = min(2 * self._pause, 2 * HEARTBEAT_SECONDS)
        self._next = time.monotonic() + self._pause
        lost = [p for p in missing if p not in replies and self._is_lost(p, now)]
        if lost:
            raise PeerLostError("it did not come to agree upon the next program.", ranks=lost)
        for process in replies:
            self._silent_since.pop(process, None)
        # A process that has not run anything here is about to write its mark.
        ran = {p: reply["ran"] for p, reply in replies.items() if reply.get("ran") is not None}
        self._alike |= {p for p, mark in ran.items() if mark == self.program.mark}
        return min(ran.keys() - self._alike, default=None)

    def _is_lost(self, process: int, now: float) -> bool:
        state = self.peers.known(process)
        silent = now - self._silent_since.setdefault(process, now) >= SILENT_CALLER_SECONDS
        return state in ("ended", "dead") or (state == "here" and silent and followed() is None)

    def _mismatch(self, other: int, ran: Sequence[int]) -> dict[str, Any]:
        """The verdict that this process and another bring different programs."""
        ask = self.peers.ask
        reply = ask(self.group, self.position, [other], _LINES_SECONDS, lines=True).get(other, {})
        theirs = unpacked(reply["lines"]) if "lines" in reply else ["(its program is not known)"]
        sides = {self.peers.process: unpacked(self.program.lines), other: theirs}
        text = _MISMATCH.format(
            position=self.position,
            done=f"process {ran[0]} runs one and waits in it" if ran else "nothing was run",
            sides=first_difference(dict(sorted(sides.items()))),
        )
        return {"error": text, "is_run": bool(ran)}


def divergent(digests: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Groups of those who hold the same, for each leaf of which not all do, by its digests."""
    paths = tuple(next(iter(digests.values())))
    found = [[[int(held[path], 16)] for path in paths] for held in digests.values()]
    return ReplicaCheck(np.array(found, np.uint64), paths, tuple(digests)).divergent()
