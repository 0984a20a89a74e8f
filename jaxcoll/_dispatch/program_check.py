"""Processes compare their programs before one follows another for the first time.

Each writes the mark of its program; the first process of the group reads all of them and writes
the verdict, which the others wait for. That is two messages a process, and three for the first,
whatever their number; the lines of a program travel only where marks differ.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import HEARTBEAT_SECONDS, SILENT_CALLER_SECONDS
from jaxcoll._dispatch.call_history import Entered
from jaxcoll._dispatch.executable import FirstValues, Program
from jaxcoll._dispatch.fingerprint import first_difference
from jaxcoll._dispatch.peers import Peers
from jaxcoll._errors import (
    PeerLostError,
    ProgramMismatchError,
    ReplicaDivergenceError,
    SameRowsWarning,
)

PATIENCE_SECONDS = 0.25
"""How long a mark is waited for before its process is asked what it does instead."""

LINES_SECONDS, LEAVES_SECONDS = 2.0, 10.0
"""How long the lines of another process, and the digests of its leaves, are waited for."""

_MISMATCH = """\
Processes are about to run different programs as call {position}; {done}. The first difference:
{sides}
Every process has to call the same function, with arguments of the same structure, shapes and \
dtypes and the same options, under the same version of JAX, its settings and `XLA_FLAGS`, and on \
the same kind of processor."""

_DIFFERENT = """\
{name}: processes hold different values in {n} of {of} leaves that every replica gets whole, \
{leaf} first: processes {groups}. Nothing was run. Make them from one seed, or read them from \
one file, on every process; what is meant to differ is a batch, or a `PerReplica`."""

_SAME_ROWS = """\
{name}: all {n} processes pass the same rows in {leaf}. Each process passes its own share of the \
batch, so that these rows count {n} times; if this is the whole batch, pass this process's part \
of it, as in `rows[jax.process_index()::jax.process_count()]`."""


class ProgramCheck:
    """The agreement of one process group, by its name, on the program that each call runs."""

    def __init__(self, peers: Peers, group: str, processes: Sequence[int]) -> None:
        self._peers, self._group, self._processes = peers, group, processes
        self._last_folder = ""

    def disagreement(self, program: Program, call: Entered) -> tuple[Exception, bool] | None:
        """Wait until all processes are about to run the same `Program`: None.

        Or the error that says what differs, and whether nobody has run anything.
        """
        peers = self._peers
        folder = f"{peers.root}/agree/{self._group}/{call.position}"
        first = program.uncompared
        if first is not None:
            peers.store.set(f"{folder}/values/{peers.process}", first.short)
        peers.store.set(f"{folder}/marks/{peers.process}", call.mark)
        if peers.process != self._processes[0]:
            verdict = self._await_verdict(call, folder)
        else:
            verdict = self._verdict(call, folder)
            peers.store.set(f"{folder}/verdict", json.dumps(verdict))
            if verdict["same"]:  # all are here, and so have read the verdict before this one
                if self._last_folder:
                    peers.store.delete(self._last_folder)
                self._last_folder = folder
        if not verdict["same"]:
            return self._mismatch(program, call, verdict, folder)
        different = None if first is None else self._divergence(program.name, first, folder)
        return None if different is None else (different, True)

    def _mismatch(
        self, program: Program, call: Entered, verdict: dict[str, Any], folder: str
    ) -> tuple[Exception, bool]:
        if not verdict.get("show"):
            return ProgramMismatchError(verdict["text"]), False
        ran, sides = verdict["ran"], dict.fromkeys(verdict["show"], ("(its lines did not arrive)",))
        sides |= self._shown(sides, f"{folder}/lines", program.lines, LINES_SECONDS)
        done = f"process {ran[0]} runs one and waits in it" if ran else "nothing was run"
        text = _MISMATCH.format(position=call.position, done=done, sides=first_difference(sides))
        return ProgramMismatchError(text), not ran

    def _divergence(
        self, name: str, mine: FirstValues, folder: str
    ) -> ReplicaDivergenceError | None:
        """Compare the digests of all processes: the error that they raise; None: none differ."""
        # Digests of all leaves in one: leaves by themselves are exchanged only where these differ.
        texts = self._peers.store.all(f"{folder}/values")
        short = {int(p): text.split(":") for p, text in texts.items()}
        groups: dict[str, list[int]] = {}
        for process in sorted(short):
            groups.setdefault(short[process][0], []).append(process)
        if len(groups) > 1:
            named = tuple(
                tuple(map(str, group)) for group in sorted(groups.values(), key=len, reverse=True)
            )
            sides = [int(group[0]) for group in named[:2]]
            leaves = self._shown(sides, f"{folder}/leaves", mine.replicated, LEAVES_SECONDS)
            one, other = leaves.values() if len(leaves) == 2 else (mine.replicated, {})
            paths = [path for path in one if one[path] != other.get(path)]
            text = _DIFFERENT.format(
                name=name,
                n=len(paths),
                of=len(mine.replicated),
                leaf=paths[0],
                groups=" | ".join(map(", ".join, named)),
            )
            return ReplicaDivergenceError(text, divergent=dict.fromkeys(paths, named))
        rows, n = {text for _, text in short.values()}, len(self._processes)
        if len(short) == n > 1 and len(rows) == 1 and rows != {""}:
            text = _SAME_ROWS.format(name=name, n=n, leaf=next(iter(mine.rows)))
            warnings.warn(text, SameRowsWarning, stacklevel=2)
        mine.done = True
        return None

    def _shown(
        self, sides: Collection[int], folder: str, mine: Any, seconds: float
    ) -> dict[int, Any]:
        """What some processes show of their own, this one's `mine` among it; the late ones' not."""
        store, me = self._peers.store, self._peers.process
        if me in sides:
            store.set(f"{folder}/{me}", json.dumps(mine))
        found = {}
        for process in sides:
            with contextlib.suppress(TimeoutError):
                found[process] = json.loads(store.get(f"{folder}/{process}", seconds))
        return found

    def _verdict(self, call: Entered, folder: str) -> dict[str, Any]:
        """What the marks of all processes say, as far as it takes to know."""
        peers, inquiry = self._peers, _Inquiry(self._peers, self._group, call)
        pause = 0.001
        while True:
            marks = {int(p): m for p, m in peers.store.all(f"{folder}/marks").items()}
            other = next((p for p in sorted(marks) if marks[p] != call.mark), None)
            missing = [p for p in self._processes if p not in marks and p not in inquiry.alike]
            if other is not None:
                return {"same": False, "show": [peers.process, other], "ran": inquiry.ran(missing)}
            if not missing:
                return {"same": True}
            if text := inquiry.about(missing):
                return {"same": False, "text": text}
            time.sleep(pause)  # short at first: as a rule all arrive within milliseconds
            pause = min(2 * pause, 0.05)

    def _await_verdict(self, call: Entered, folder: str) -> dict[str, Any]:
        """The verdict of the first process; or one of this process's own, if it does not come."""
        inquiry = _Inquiry(self._peers, self._group, call)
        while True:
            try:
                return json.loads(self._peers.store.get(f"{folder}/verdict", PATIENCE_SECONDS))
            except TimeoutError:
                if text := inquiry.about(self._processes[:1]):
                    return {"same": False, "text": text}
                if inquiry.alike:
                    return {"same": True}


class _Inquiry:
    """Asks processes that do not come, at growing intervals, what they do instead."""

    def __init__(self, peers: Peers, group: str, call: Entered) -> None:
        self._peers, self._group, self._call = peers, group, call
        self._silent_since: dict[int, float] = {}
        # Those that run the same program here, and saw nothing to agree upon
        self.alike: set[int] = set()
        self._wait = PATIENCE_SECONDS
        self._next = time.monotonic() + self._wait

    def about(self, missing: Sequence[int]) -> str:
        """What somebody runs in the place of this call, in words; "" if nobody is known to.

        Raises:
          PeerLostError: one has ended; or, where no connection reports that, has not answered for
            long.
        """
        now = time.monotonic()
        if now < self._next:
            return ""
        replies = self._peers.ask(self._group, self._call.position, missing)
        self._wait = min(2 * self._wait, 2 * HEARTBEAT_SECONDS)
        self._next = time.monotonic() + self._wait
        lost = [p for p in missing if p not in replies and self._is_lost(p, now)]
        if lost:
            raise PeerLostError("it did not come to agree upon the next program.", ranks=lost)
        for process, reply in sorted(replies.items()):
            self._silent_since.pop(process, None)
            # A process that has not agreed either is about to write its mark.
            ran = reply.get("agreed", 0) >= self._call.position
            if ran and reply["mark"] != self._call.mark:
                return self._in_words(process, reply)
            if ran:
                self.alike.add(process)
        return ""

    def ran(self, missing: Sequence[int]) -> list[int]:
        """Those that saw nothing to agree upon, and run what they always ran here."""
        position = self._call.position
        replies = self._peers.ask(self._group, position, missing) if missing else {}
        return sorted(p for p, reply in replies.items() if reply.get("agreed", 0) >= position)

    def _is_lost(self, process: int, now: float) -> bool:
        known = self._peers.known(process)
        silent = now - self._silent_since.setdefault(process, now) >= SILENT_CALLER_SECONDS
        return known in ("ended", "dead") or (known == "here" and silent and followed() is None)

    def _in_words(self, process: int, reply: dict[str, Any]) -> str:
        here = self._peers.process
        if reply["then"] == self._call.name:
            sides = {here: self._call.lines, process: reply["lines"]}
            difference = first_difference(dict(sorted(sides.items())))
        else:
            names = sorted([(here, self._call.name), (process, reply["then"])])
            difference = "\n".join(f"process {p}: {name}" for p, name in names)
        return (
            f"Processes run different programs as call {self._call.position}. The first "
            f"difference:\n{difference}\nProcess {process} may wait in it for the others. Every "
            "process has to make the same calls, with arguments of the same shapes and the same "
            "options, in the same order."
        )
