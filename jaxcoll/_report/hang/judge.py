"""The verdict on a job that hangs: a pure function of one row of each process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Literal

_BUSY = 0.03  # of a core: a process that uses more computes; in waits it is 0.01 at most
SHARE = 0.7  # of the limit after which a process that waits counts, once another asks
_PATIENCE = 6
"""A process may compile for so many limits while the others wait."""

WAITS, ENDS = ("program", "barrier"), ("shutdown", "ended", "exit")


@dataclasses.dataclass
class Row:
    """The state of one process, as it says itself, or its host if it is silent."""

    rank: int
    kind: str = "silent"  # a state of `jaxcoll._report.hang.report`
    seconds: float = 0.0  # since when
    program: str | None = None
    where: list[list[Any]] = dataclasses.field(default_factory=list)  # see Thread.show_places
    cpu: float = 0.0  # cores in use within the limit; 0 if that does not show whether it computes
    ended: str | None = None  # its program has ended, with this error if any
    calls: dict[str, int] | None = None  # of each program with collectives; None: not known
    order: list[str] = dataclasses.field(default_factory=list)  # the newest of those calls
    programs: dict[str, int] = dataclasses.field(default_factory=dict)  # with their devices
    devices: int = 0
    pid: int | None = None
    threads: list[int] = dataclasses.field(default_factory=list)  # the watcher, and the main one
    host: str = ""
    at: float = 0.0  # seconds since 1970
    silence: float | None = None  # seconds since it was last seen, if it does not answer
    mixed: list[str] = dataclasses.field(default_factory=list)
    """The names of programs with collectives that programs without have as well."""

    @property
    def is_busy(self) -> bool:
        return self.cpu >= _BUSY

    @property
    def waited(self) -> float:
        """For how many seconds it has waited for others."""
        return self.seconds if self.kind in (*WAITS, "shutdown") else 0.0

    def has_waited(self, seconds: float) -> bool:
        """True if it has waited for so long, and not computed."""
        return self.waited >= seconds and not self.is_busy


@dataclasses.dataclass
class Verdict:
    """The processes that wait, and those they wait for."""

    kind: Literal["missing", "order", "inside"]
    waiting: list[int]
    missing: list[int]
    seconds: float
    program: str | None = None
    call: int | None = None  # the call of `program` that the missing processes did not make
    first: int | None = None  # the first call that differs, counting all programs
    calls: dict[int, str] = dataclasses.field(default_factory=dict)  # that call, by rank


def judge(rows: Mapping[int, Row], limit: float) -> Verdict | None:
    """Find who waits for whom; None if nobody waits in vain, as far as can be known."""
    if any(row.kind == "debugger" for row in rows.values()):
        return None
    waiting = _find_waiting(rows, limit)
    missing = [r for r, row in rows.items() if r not in waiting and row.kind != "unknown"]
    if not waiting:
        return None
    seconds = max(rows[r].seconds for r in waiting)
    program = Counter(rows[r].program for r in waiting).most_common(1)[0][0]
    devices = {name: n for row in rows.values() for name, n in row.programs.items()}
    everybody = max(row.devices for row in rows.values())
    if devices.get(program or "", everybody) < everybody:
        # Only processes that have compiled it may be among its devices.
        missing = [r for r in missing if not rows[r].programs or program in rows[r].programs]
    if any(rows[r].kind in WAITS and not rows[r].is_busy for r in missing) and seconds < 2 * limit:
        return None  # they came late, and now wait with the others
    verdict = Verdict("missing", waiting, missing, seconds, program)
    _compare_calls(verdict, rows, {name for name, n in devices.items() if n == everybody})
    if verdict.kind == "missing" and not missing:
        places = {(rows[r].kind, rows[r].program) for r in waiting}
        # Two that wait alike, of which the program of only one is known, may be in the same.
        unnamed = {place for place in places if place[1] is None}
        known = places if len({kind for kind, _ in places}) > 1 else places - unnamed
        if len(known) > 1:
            verdict.kind = "order"
            verdict.calls = {r: rows[r].program or rows[r].kind for r in waiting}
        elif not any(row.kind == "unknown" for row in rows.values()):
            verdict.kind = "inside"
            verdict.program = None if unnamed else verdict.program
    compiling = missing and all(rows[r].kind == "compile" for r in missing)
    return None if compiling and seconds < _PATIENCE * limit else verdict


def _find_waiting(rows: Mapping[int, Row], limit: float) -> list[int]:
    # One that computes does not wait, also where its calls in a loop look like one long call.
    waiting = [r for r, row in rows.items() if row.kind in WAITS and row.has_waited(SHARE * limit)]
    ended = [r for r, row in rows.items() if row.kind in ENDS]
    soon = any(row.kind == "program" and not row.is_busy for row in rows.values())
    # They wait at the end, and no other process will soon report a hang.
    return ended if not waiting and len(ended) < len(rows) and not soon else waiting


def _compare_calls(verdict: Verdict, rows: Mapping[int, Row], names: Collection[str]) -> None:
    # All may call `mean` of a global array, and one process that of an array of its own.
    mixed = {name for row in rows.values() for name in row.mixed}
    names = {*names} - mixed
    counts = {r: row.calls for r, row in rows.items() if row.calls}
    order = {r: [n for n in rows[r].order if n in names] for r in counts}
    ends = {r: sum(counts[r].get(name, 0) for name in names) for r in counts}
    begins = {r: ends[r] - len(order[r]) for r in counts}  # the calls before the newest ones
    for at in range(max(begins.values(), default=0), min(ends.values(), default=0)):
        calls = {r: order[r][at - begins[r]] for r in counts}
        if len(set(calls.values())) > 1:
            verdict.first, verdict.calls = at + 1, calls
            break
    missing, first = verdict.missing, verdict.waiting[0]
    if verdict.calls:
        if all(rows[r].kind in (*ENDS, "dead") for r in missing):
            verdict.kind = "order"
        return
    # A process that was seen last some time ago may have made more calls since.
    if not missing or not all(r in counts and rows[r].silence is None for r in [*missing, first]):
        return
    at = min(ends[r] for r in missing) - begins[first]
    if 0 <= at < len(order[first]):  # the first call that a missing process did not make
        name = verdict.program = order[first][at]
        verdict.call = counts[first][name] - order[first][at + 1 :].count(name)
        return
    has_called = verdict.program in {*counts[first]} - mixed
    if has_called and all(rows[r].kind in ("python", *ENDS) for r in missing):
        verdict.kind = "inside"  # they have called it too
