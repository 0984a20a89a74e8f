"""A hang in words, and on standard error."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxcoll._report.hang.judge import Row, Verdict
from jaxcoll._show.units import pluralize

_STATES = {
    "stopped": "is stopped, as by SIGSTOP",
    "dead": "is dead",
    "debugger": "is in a debugger",
    "disk": "waits for a disk or a file system",
    "silent": "does not answer: stopped, cut off, dead, or in native code that holds the GIL",
    "locked": "does not answer: native code that {} holds the GIL",
    "compile": "traces or compiles",
    "callback": "is in a host callback",
    "python": "has been in no program",
    "shutdown": "waits in jax.distributed.shutdown",
    "program": "is in a program",
    "barrier": "waits at a barrier of the coordination service",
    "exit": "is in a function of atexit",
    "ended": "waits at its end",
}
_MOST_PLACES = 4


def show_report(verdict: Verdict, rows: Mapping[int, Row], collective: str) -> Iterator[str]:
    """Yield the lines of a report; `collective` is the first of the program."""
    have = "have" if len(verdict.waiting) > 1 else "has"
    waited = f"{_list(verdict.waiting)} of {len(rows)} {have} waited {verdict.seconds:.1f} s"
    missing = f" for {_list(verdict.missing)}" if verdict.missing else ""
    at_barriers = all(rows[r].kind == "barrier" for r in verdict.waiting)
    where = _quote(verdict.program, at_barriers)
    yield (
        waited
        + {
            "missing": f"{missing}.",
            "order": ", in different barriers." if at_barriers else ", in different programs.",
            "inside": f" inside {where}, which all have called." if where else " for one another.",
        }[verdict.kind]
    )
    if verdict.first is not None:
        ranks: dict[str, list[int]] = defaultdict(list)
        for r, name in verdict.calls.items():
            ranks[name].append(r)
        calls = ", but ".join(f"`{name}` in {_list(some)}" for name, some in ranks.items())
        yield f"  the first call that differs is call {verdict.first}: {calls}"
    alike: dict[Any, list[int]] = defaultdict(list)
    for r in verdict.waiting:
        place = rows[r].where[0][:4] if rows[r].where else []
        alike[rows[r].kind, rows[r].program, *place].append(r)
    for (kind, name, *place), some in alike.items():
        nth = ""
        if verdict.call is not None and kind == "program":
            nth, name = f"call {verdict.call} of ", verdict.program
        state = "in JAX" if kind == "program" else re.sub(r"^(is|waits) ", "", _STATES[kind])
        name = _quote(name, kind == "barrier")
        yield f"  {_list(some)}: {f'in {nth}{name}' if name else state}"
        if place:
            yield "    {}:{} in {}: {}".format(*place)
        if collective and name == where:
            yield f"    {collective}"
    for r in verdict.missing:
        yield from _show_missing(rows[r], verdict.program)
    if unknown := [r for r, row in rows.items() if row.kind == "unknown"]:
        yield f"  nothing can be known of {_list(unknown)}: the coordinator does not answer"


def _show_missing(row: Row, program: str | None) -> Iterator[str]:
    state = _STATES[row.kind].format("computes" if row.is_busy else "waits")
    if row.kind == "program" and row.is_busy:
        state = "computes"
    if row.ended is not None:
        state = f"has ended its program{' with ' * bool(row.ended)}{row.ended}, and {state}"
    seen = f"; last seen {row.silence:.1f} s ago" if row.silence is not None else ""
    if not seen and row.seconds:
        state += f" for {row.seconds:.1f} s"
    are_known = row.kind != "callback" and program not in row.mixed and not seen
    if are_known and row.calls and program in row.calls:
        state += f", after {pluralize(row.calls[program], 'call')} of `{program}`"
    where = f" (pid {row.pid} on {row.host}{seen})" if row.pid else ""
    yield f"  process {row.rank} {state}{where}{':' if row.where else ''}"
    is_now = not seen or row.kind == "locked"
    for file, line, function, call, seconds in row.where[:_MOST_PLACES]:
        yield f"    {file}:{line} in {function}: {call}" + f"  ({seconds:.1f} s)" * is_now


def _quote(name: str | None, is_barrier: bool) -> str:
    return f"{'barrier ' * is_barrier}`{name}`" if name else ""


def _list(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"process{'es' * bool(most)} {', '.join(most)}{' and ' * bool(most)}{last}"


def say(*lines: str) -> None:
    """Write to standard error at once, whoever has the lock of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"jaxcoll hang: {line}\n" for line in lines).encode())
