"""Who is missing in a job that hangs, judged from one row of each process, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxcoll._show.units import pluralize

_BUSY = 0.05
"""A process that uses more of a core than this computes."""
_PATIENCE = 6
"""A process may compile for so many limits while the others wait."""

WAITS, ENDS = ("program", "barrier"), ("shutdown", "ended", "exit")

_STATES = {
    "stopped": "is stopped, as by SIGSTOP",
    "dead": "is dead",
    "debugger": "is in a debugger",
    "disk": "waits for a disk or a file system",
    "silent": "does not answer: stopped, cut off, dead, or in native code that holds the GIL",
    "compile": "traces or compiles",
    "callback": "is in a host callback",
    "python": "has been in no program",
    "shutdown": "waits in jax.distributed.shutdown",
    "program": "computes",
    "barrier": "waits at a barrier of the coordination service",
    "exit": "is in a function of atexit",
    "ended": "waits at its end",
}


@dataclasses.dataclass
class Row:
    """What one process says of itself, or its host of it if it is silent."""

    rank: int
    kind: str = "silent"  # one of _STATES, "locked" (its GIL is taken), or "unknown"
    seconds: float = 0.0  # since when
    program: str | None = None
    where: list[list[Any]] = dataclasses.field(default_factory=list)  # see Thread.places
    cpu: float = 0.0  # cores in use
    ended: str | None = None  # its program has ended, with this error if any
    calls: dict[str, int] | None = None  # of each program with collectives; None: not known
    order: list[str] = dataclasses.field(default_factory=list)  # the newest of those calls
    programs: dict[str, int] = dataclasses.field(default_factory=dict)  # with their devices
    devices: int = 0
    platform: str = ""
    pid: int | None = None
    host: str = ""
    silence: float | None = None  # seconds since it was last seen, if it does not answer

    @property
    def is_busy(self) -> bool:
        return self.cpu >= _BUSY and self.platform == "cpu"  # other devices compute unseen


@dataclasses.dataclass
class Verdict:
    """Who waits for whom."""

    kind: Literal["missing", "order", "inside"]
    waiting: list[int]
    missing: list[int]
    seconds: float
    program: str | None = None
    call: int | None = None  # the call of `program` that the missing processes did not make
    first: int | None = None  # the first call that differs, counting all programs
    calls: dict[int, str] = dataclasses.field(default_factory=dict)  # that call, by rank


def judge(rows: Mapping[int, Row], limit: float) -> Verdict | None:
    """Return who waits for whom; None if nobody waits in vain, as far as can be known."""
    if any(row.kind == "debugger" for row in rows.values()):
        return None
    waiting = [r for r, row in rows.items() if row.kind in WAITS and row.seconds >= 0.7 * limit]
    ended = [r for r, row in rows.items() if row.kind in ENDS]
    in_vain = any(row.kind == "program" and not row.is_busy for row in rows.values())
    if not waiting and len(ended) < len(rows) and not in_vain:
        waiting = ended  # they wait at the end, and no other process will soon report a hang
    missing = [r for r, row in rows.items() if r not in waiting and row.kind != "unknown"]
    busy = [r for r in waiting if rows[r].is_busy]
    if not waiting or (not missing and len(busy) == len(rows)):
        return None
    if not missing and busy:
        waiting, missing = [r for r in waiting if r not in busy], busy
    seconds = max(rows[r].seconds for r in waiting)
    program = Counter(rows[r].program for r in waiting).most_common(1)[0][0]
    devices = {name: n for row in rows.values() for name, n in row.programs.items()}
    everybody = max(row.devices for row in rows.values())
    if devices.get(program or "", everybody) < everybody:
        missing = [r for r in missing if not rows[r].programs or program in rows[r].programs]
    came_late = any(rows[r].kind in WAITS and not rows[r].is_busy for r in missing)
    if came_late and seconds < 2 * limit:
        return None  # they now wait with the others
    verdict = Verdict("missing", waiting, missing, seconds, program)
    _compare_calls(verdict, rows, {name for name, n in devices.items() if n == everybody})
    if verdict.kind == "missing" and not missing:
        places = {r: rows[r].program or _STATES.get(rows[r].kind, "") for r in waiting}
        verdict.kind = "inside"
        if len(set(places.values())) > 1:
            verdict.kind, verdict.calls = "order", places
    compiling = missing and all(rows[r].kind == "compile" for r in missing)
    return None if compiling and seconds < _PATIENCE * limit else verdict


def _compare_calls(verdict: Verdict, rows: Mapping[int, Row], names: set[str]) -> None:
    """Say which call the missing processes did not make, or which is the first that differs."""
    order = {r: [n for n in row.order if n in names] for r, row in rows.items() if row.calls}
    total = {r: sum(n for name, n in (rows[r].calls or {}).items() if name in names) for r in order}
    known = max((total[r] - len(order[r]) for r in order), default=0)
    for at in range(known, min(total.values(), default=0)):
        calls = {r: order[r][at - total[r] + len(order[r])] for r in order}
        if len(set(calls.values())) > 1:
            verdict.first, verdict.calls = at + 1, calls
            break
    waits, missing = verdict.waiting, verdict.missing
    counts = {r: (rows[r].calls or {}).get(verdict.program or "", 0) for r in rows}
    is_known = all(r in order for r in [*missing, waits[0]])
    if verdict.calls:
        gone = all(rows[r].kind in (*ENDS, "dead") for r in missing)
        if gone or not missing:
            verdict.kind = "order"
        return
    if not missing or not is_known:
        return
    done = min(total[r] for r in missing)
    at = done - total[waits[0]] + len(order[waits[0]])
    if 0 <= at < len(order[waits[0]]):  # the first call that a missing process did not make
        name = verdict.program = order[waits[0]][at]
        later = order[waits[0]][at + 1 :].count(name)
        verdict.call = (rows[waits[0]].calls or {})[name] - later
    elif counts[waits[0]] and all(rows[r].kind in ("python", *ENDS) for r in missing):
        verdict.kind = "inside"  # they have called it too


def _processes(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"process{'es' * bool(most)} {', '.join(most)}{' and ' * bool(most)}{last}"


def report(verdict: Verdict, rows: Mapping[int, Row], collective: str) -> Iterator[str]:
    """Yield the lines of the report; `collective` is the first of the program."""
    waiting, several = verdict.waiting, len(verdict.waiting) > 1
    waited = f"{_processes(waiting)} of {len(rows)} {'have' if several else 'has'} waited"
    waited = f"{waited} {verdict.seconds:.1f} s"
    yield {
        "missing": f"{waited} for {_processes(verdict.missing)}."
        if verdict.missing
        else f"{waited}.",
        "order": f"{waited}, in different programs.",
        "inside": f"{waited} inside `{verdict.program}`, which all have called.",
    }[verdict.kind]
    if verdict.first is not None:
        names = dict.fromkeys(verdict.calls.values())
        who = [_processes([r for r in verdict.calls if verdict.calls[r] == n]) for n in names]
        calls = ", but ".join(f"`{n}` in {ranks}" for n, ranks in zip(names, who, strict=True))
        yield f"  the first call that differs is call {verdict.first}: {calls}"
    alike: dict[Any, list[int]] = defaultdict(list)
    for r in waiting:
        place = [*rows[r].where[:1], []][0][:4]
        alike[rows[r].kind, rows[r].program, *place].append(r)
    for (kind, name, *place), ranks in alike.items():
        nth = ""
        if verdict.call is not None and kind == "program":
            nth, name = f"call {verdict.call} of ", verdict.program
        state = "waits in JAX" if kind == "program" else _STATES[kind]
        state = f"in {nth}`{name}`" if name else state
        yield f"  {_processes(ranks)}: {state}"
        if place:
            yield "    {}:{} in {}: {}".format(*place)
        if collective and name == verdict.program:
            yield f"    {collective}"
    for r in verdict.missing:
        yield from _absent(rows[r], verdict.program)


def _absent(row: Row, program: str | None) -> Iterator[str]:
    state = _STATES.get(row.kind, "")
    if row.kind == "locked":
        computes = "computes" if row.cpu >= _BUSY else "waits"
        state = f"does not answer: native code that {computes} holds the GIL"
    if row.ended is not None:
        ended = f"has ended its program{' with ' * bool(row.ended)}{row.ended}"
        state = f"{ended}, and {state}" if row.kind != "ended" else ended
    if row.silence is None and row.seconds:
        state += f" for {row.seconds:.1f} s"
    if row.calls and program in row.calls and row.silence is None:
        state += f", after {pluralize(row.calls[program], 'call')} of `{program}`"
    seen = f"; last seen {row.silence:.1f} s ago" if row.silence is not None else ""
    where = f" (pid {row.pid} on {row.host}{seen})" if row.pid else ""
    yield f"  process {row.rank} {state}{where}{':' if row.where else ''}"
    for file, line, function, call, seconds in row.where[:4]:
        yield f"    {file}:{line} in {function}: {call}  ({seconds:.1f} s)"


def say(*lines: str) -> None:
    """Write to standard error at once, whoever has the lock of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"jaxcoll hang: {line}\n" for line in lines).encode())
