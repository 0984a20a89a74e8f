"""Processes agree on the program of a call before any of its data moves.

Each process writes the digest of its program. The first process of the group reads all digests and
writes the verdict, for which the others wait. That is two messages per process, and three for the
first, whatever the number of processes. Only if digests differ does a process ask another one's
watchdog for the lines of its program.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcoll._collectives.check_replicas import ReplicaCheck
from jaxcoll._job.liveness import coordinator_connection
from jaxcoll._job.timing import (
    FIRST_POLL_SECONDS,
    HEARTBEAT_SECONDS,
    LAST_POLL_SECONDS,
    LINES_SECONDS,
    PATIENCE_SECONDS,
    SILENT_CALLER_SECONDS,
)
from jaxcoll._runtime.executable import Program
from jaxcoll._runtime.fingerprint import FirstValues, find_difference, unpack_lines
from jaxcoll._runtime.peers import Peers
from jaxcoll._show.units import pluralize
from jaxcoll.errors import PeerLostError, ProgramMismatchError, ReplicaDivergenceError

_MISMATCH = """\
Processes are about to run different programs as call {position}; {done}. The first difference:
{sides}
Every process must make the same calls in the same order: the same function, with arguments of \
the same structure, names, shapes and dtypes, the same constants and options, under the same \
version of JAX, its settings and `XLA_FLAGS`, on the same kind of processor."""

_DIFFERENT = """\
{name}: processes pass different values in {n} of {of} that must be equal on every \
replica. The first is {leaf}: processes {groups}. Nothing was run. Make them from one seed, or \
read them from one file, on every process. Put values that differ into a batch or a `PerReplica`."""

_SAME_ROWS = """\
{name}: all {n} processes pass the same rows in {leaf}. Each process should pass its own share of \
the batch, so these rows count {n} times. If this is the whole batch, pass only this process's \
part, as in `rows[jax.process_index()::jax.process_count()]`."""


@dataclasses.dataclass(eq=False)
class Agreement:
    """The protocol in which a group's processes agree on the program of one call."""

    peers: Peers
    group: str
    processes: Sequence[int]
    position: int
    program: Program
    first: FirstValues | None  # this process's arguments, if it is the program's first run
    warn: Callable[[str], None]
    value: Any  # for the others, if the call has no program
    check: Callable[[], None]  # raises when the group has failed, and nobody will come

    def __post_init__(self) -> None:
        self.folder = f"{self.peers.root}/agree/{self.group}/{self.position}"
        # Processes that have run the same program as this call without an agreement
        self._alike: set[int] = set()
        self.is_run = False
        self._silent_since: dict[int, float] = {}
        self._pause, self._next = PATIENCE_SECONDS, time.monotonic() + PATIENCE_SECONDS

    def reach(self) -> dict[int, Any]:
        """Wait until all processes are about to run the same program.

        Returns:
          The value of each process, if the call has no program.

        Raises:
          ProgramMismatchError: they are not, on all processes; `is_run` says whether one already
            runs its own.
          ReplicaDivergenceError: their arguments differ, on all processes.
          PeerLostError: a process is lost.
        """
        store, me, first = self.peers.store, self.peers.process, self.first
        whole, rows = ("", "") if first is None else first.short()
        if first is not None:
            store.set(f"{self.folder}/values/{me}", json.dumps(first.replicated))
        if self.value is not None:
            store.set(f"{self.folder}/values/{me}", json.dumps(self.value))
        # After the values: whoever has read all digests finds all values.
        store.set(f"{self.folder}/digests/{me}", json.dumps([self.program.digest, whole, rows]))
        # One process judges and the others read its verdict, so they agree on the error, too.
        if me == self.processes[0]:
            verdict = self._judge()
            store.set(f"{self.folder}/verdict", json.dumps(verdict))
        else:
            verdict = self._wait_for_verdict()
        if "divergent" in verdict:
            groups = {leaf: tuple(map(tuple, of)) for leaf, of in verdict["divergent"].items()}
            raise ReplicaDivergenceError(verdict["error"], divergent=groups)
        if "error" in verdict:
            self.is_run = verdict["is_run"]
            raise ProgramMismatchError(verdict["error"])
        if "same_rows" in verdict and first is not None:
            leaf, n = next(iter(first.rows)), len(self.processes)
            self.warn(_SAME_ROWS.format(name=self.program.name, n=n, leaf=leaf))
        if self.value is None:
            return {}
        texts = store.all(f"{self.folder}/values")
        return {process: json.loads(texts[str(process)]) for process in self.processes}

    def _judge(self) -> dict[str, Any]:
        """Judge the processes' digests: the first mismatch ends the wait."""
        pause = FIRST_POLL_SECONDS
        while True:
            self.check()
            digests = self.peers.store.all(f"{self.folder}/digests")
            entries = {int(p): json.loads(text) for p, text in digests.items()}
            differing = [p for p in sorted(entries) if entries[p][0] != self.program.digest]
            # Those that have run this program as an expected one do not come to agree on it.
            late = [p for p in self.processes if p not in entries and p not in self._alike]
            if differing:
                replies = self.peers.ask(self.group, self.position, late) if late else {}
                ran = [p for p in sorted(replies) if replies[p].get("ran") is not None]
                return self._mismatch(differing[0], ran)
            if not late:
                return self._compare_values(entries)
            if (other := self._find_other(late)) is not None:
                return self._mismatch(other, [other])
            time.sleep(pause)
            pause = min(2 * pause, LAST_POLL_SECONDS)

    def _wait_for_verdict(self) -> dict[str, Any]:
        """Wait for the first process's verdict; make this process's own if that does not come."""
        first = self.processes[0]
        while True:
            try:
                return json.loads(self.peers.store.get(f"{self.folder}/verdict", PATIENCE_SECONDS))
            except TimeoutError:
                self.check()
                if self._find_other([first]) is not None:
                    return self._mismatch(first, [first])
                if self._alike and not self._is_any_behind():
                    # It may have run after a verdict that came too late to be read above.
                    return json.loads(self.peers.store.try_get(f"{self.folder}/verdict") or "{}")

    def _is_any_behind(self) -> bool:
        """Ask whether another process may be in an earlier call, and take this call's data.

        If that one failed here, the first process may have done its part without this process's.
        """
        others = [p for p in self.processes if p != self.peers.process]
        replies = self.peers.ask(self.group, self.position, others)
        return any(
            replies[p]["at"] < self.position
            if p in replies
            else self.peers.find_state(p) not in ("ended", "lost")
            for p in others
        )

    def _compare_values(self, entries: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        if len({whole for _, whole, _ in entries.values()} - {""}) > 1:
            texts = self.peers.store.all(f"{self.folder}/values")
            values = {p: json.loads(texts[p]) for p in sorted(texts, key=int)}
            differing = group_divergent(values)
            leaf, groups = next(iter(differing.items()))
            text = _DIFFERENT.format(
                name=self.program.name,
                n=len(differing),
                of=pluralize(len(next(iter(values.values()))), "leaf", "leaves"),
                leaf=leaf,
                groups=" | ".join(map(", ".join, groups)),
            )
            return {"error": text, "divergent": differing}
        rows, n = {rows for _, _, rows in entries.values()}, len(self.processes)
        same = len(entries) == n > 1 and len(rows) == 1 and rows != {""}
        return {"same_rows": True} if same else {}

    def _find_other(self, late: Sequence[int]) -> int | None:
        """Ask late processes, at growing intervals, and return one that runs another program.

        Raises:
          PeerLostError: a process has ended; or, if no connection reports that, has not answered
            for too long.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        replies = self.peers.ask(self.group, self.position, late)
        self._pause = min(2 * self._pause, 2 * HEARTBEAT_SECONDS)
        self._next = time.monotonic() + self._pause
        lost = [p for p in late if p not in replies and self._is_lost(p, now)]
        if lost:
            raise PeerLostError("it did not arrive to agree on the next program.", ranks=lost)
        for process in replies:
            self._silent_since.pop(process, None)
        # A process that has not run this call is about to write its digest.
        ran = {p: reply["ran"] for p, reply in replies.items() if reply.get("ran") is not None}
        self._alike |= {p for p, digest in ran.items() if digest == self.program.digest}
        return min(ran.keys() - self._alike, default=None)

    def _is_lost(self, process: int, now: float) -> bool:
        # While the coordinator reports who has ended, a silent process may only hold its lock.
        state = self.peers.find_state(process)
        silent = now - self._silent_since.setdefault(process, now) >= SILENT_CALLER_SECONDS
        no_reports = coordinator_connection() is None
        return state in ("ended", "lost") or (state == "here" and silent and no_reports)

    def _mismatch(self, other: int, ran: Sequence[int]) -> dict[str, Any]:
        ask = self.peers.ask
        reply = ask(self.group, self.position, [other], LINES_SECONDS, lines=True).get(other, {})
        theirs = (
            unpack_lines(reply["lines"]) if "lines" in reply else ["(its program is not known)"]
        )
        sides = {self.peers.process: unpack_lines(self.program.lines), other: theirs}
        text = _MISMATCH.format(
            position=self.position,
            done=f"process {ran[0]} is already running its own" if ran else "nothing was run",
            sides=find_difference({f"process {p}": sides[p] for p in sorted(sides)}),
        )
        return {"error": text, "is_run": bool(ran)}


def group_divergent(
    digests: Mapping[str, Mapping[str, str]],
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Group the parties that agree, for each leaf that differs, as the first names it."""
    paths = tuple(next(iter(digests.values())))
    numbers = [[[int(digest, 16)] for digest in leaves.values()] for leaves in digests.values()]
    return ReplicaCheck(np.array(numbers, np.uint64), paths, tuple(digests)).divergent()
