"""The report of one program: its collectives as requested, as compiled, and as measured."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll._hlo.collective import Collective, Groups, Loop, Matmul, runs, wire_bytes
from jaxcoll._hlo.hlo import read_hlo
from jaxcoll._report.cost.overlap import Overlap, add_overlap
from jaxcoll._report.cost.rates import Rates
from jaxcoll._report.measured import Measured, add_turns
from jaxcoll._report.row_table import MOST, least, strip_folders, table, totals
from jaxcoll._report.rows import Row, make_rows
from jaxcoll._report.shown_plan import Plan
from jaxcoll._show.table import Shown, Table
from jaxcoll._show.units import WIDTH, fold, milliseconds, percent, pluralize, scale, shorten, size

_UNNAMED = ("__unnamed_function", "__unnamed_wrapped_function_")
"""JAX's names for functions without one."""
_FIGURES = (
    "name", "where", "devices", "instructions", "count", "runs", "wire_bytes",
    "requested_wire_bytes", "memory_bytes", "overlapped", "seconds", "exposed_seconds",
    "predicted_from", "unread", "unbounded", "notes", "dropped", "calls",
)  # fmt: skip
"""Attributes that are copied to JSON unchanged."""


@dataclasses.dataclass(frozen=True)
class Report(Shown):
    """Every collective of a program: as requested, as compiled, and as measured.

    `jc.inspect` and `jc.inspecting` make reports. `print(report)` shows a table, `report.plot()`
    draws the schedule or the measured step, and `report.to_json()` is for machines.

    Attributes:
      name: the compiled program's name, such as jit_step.
      where: the topology it was compiled for; "" if not known.
      devices: the number of devices it was compiled for.
      requested: the collectives of the lowered program; None if only compiled text is known.
      rows: a `Row` for each compiled collective, in the order of the schedule. An asynchronous
        start and done are one row.
      matmuls: the instructions that multiply matrices.
      loops: the loops that contain collectives or matrix products.
      instructions: the number of instructions, with the body of each loop counted once.
      overlap: the bytes and FLOP that the schedule overlaps.
      unread: descriptions of instructions that may communicate but could not be read.
      unbounded: names of loops with collectives and no known trip count; one iteration counts.
      notes: anything else that is not known, or looks wrong.
      predicted_from: the source of the rates behind predicted seconds; "" without predictions.
      memory_bytes: the most memory that the program needs on one device: arguments, results that
        do not reuse an argument's buffer, and all temporary buffers; None if not known.
      plans: the plans of jaxcoll's reductions, in order.
      calls: how often Python called it while it was watched; None if not known.
      measured: the measured times, and the ranks that arrived late; None if it was not measured.
    """

    name: str
    where: str
    devices: int
    requested: tuple[Collective, ...] | None
    rows: tuple[Row, ...]
    matmuls: tuple[Matmul, ...]
    loops: tuple[Loop, ...]
    instructions: int
    overlap: Overlap
    unread: tuple[str, ...]
    unbounded: tuple[str, ...]
    notes: tuple[str, ...]
    predicted_from: str = ""
    memory_bytes: int | None = None
    plans: tuple[Plan, ...] = dataclasses.field(default=(), compare=False, repr=False)
    calls: int | None = None
    measured: Measured | None = None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The compiled collectives, in the order of the schedule."""
        return tuple(row.compiled for row in self.rows)

    @property
    def executed(self) -> tuple[Collective, ...]:
        """The compiled collectives, with trip counts that only measured runs know."""
        return tuple(row.compiled for row in add_turns(self.rows, self.measured))

    @property
    def title(self) -> str:
        """The name, or for a function without one its first line in Python."""
        lines = (source for row in self.rows for source in row.sources)
        place = next(lines, "") if self.name.endswith(_UNNAMED) else ""
        return f"{self.name.partition('_')[0]} at {strip_folders(place)}" if place else self.name

    @property
    def count(self) -> int:
        """Number of collectives in the compiled program; one inside a loop counts once."""
        return len(self.rows)

    @property
    def runs(self) -> int:
        """Number of collectives that one run executes; an unknown trip count counts as one."""
        return runs(self.collectives)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device when the program runs once.

        This is what a byte-optimal implementation of each collective sends. A loop without a known
        trip count counts one iteration, and `uncounted` names it.
        """
        return wire_bytes(self.collectives)

    @property
    def requested_wire_bytes(self) -> int | None:
        """The wire bytes of the program as requested; None if that is not known."""
        return None if self.requested is None else wire_bytes(self.requested)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Descriptions of traffic that the figures leave out; empty if they are complete."""
        why = "has no known trip count: its collectives are counted for one iteration."
        return (*self.unread, *(f"loop {name!r} {why}" for name in self.unbounded))

    @property
    def dropped(self) -> tuple[int, ...]:
        """Positions in `requested` of collectives that the compiled program does not contain."""
        matched = {i for row in self.rows for i in row.requested}
        return tuple(i for i in range(len(self.requested or ())) if i not in matched)

    @property
    def overlapped(self) -> float | None:
        """Share of the reduced bytes that overlap with matrix products; None if none is reduced.

        Counts all-reduces and reduce-scatters, for each iteration of a loop. A collective overlaps
        if it is asynchronous and a matrix product is scheduled between its start and its end.
        """
        reduced = self.overlap.reduced
        return reduced.behind / reduced.nbytes if reduced.nbytes else None

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of communication in one run; None without a prediction."""
        if not self.predicted_from:
            return None
        return sum(row.compiled.turns * (row.seconds or 0.0) for row in self.rows)

    @property
    def exposed_seconds(self) -> float | None:
        """The part of `seconds` that no matrix product hides; None without a prediction."""
        if not self.predicted_from:
            return None
        return sum(row.exposed_seconds or 0.0 for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain numbers and strings; bytes and elements are those of one device."""
        groups: dict[Groups, int] = {}  # each is written once: they are long

        def plain(c: Collective) -> dict[str, Any]:
            alone = dataclasses.asdict(dataclasses.replace(c, groups=()))
            figures = {"bytes": c.nbytes, "wire_bytes": c.wire_bytes}
            return alone | figures | {"groups": groups.setdefault(c.groups, len(groups))}

        requested = None if self.requested is None else [plain(r) for r in self.requested]
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "overlap": dataclasses.asdict(self.overlap),
            "measured": self.measured and dataclasses.asdict(self.measured),
            "requested": requested,
            "rows": [
                vars(row) | {"compiled": plain(row.compiled), "wire_bytes": row.wire_bytes}
                for row in self.rows
            ],
            "matmuls": [dataclasses.asdict(m) for m in self.matmuls],
            "loops": [dataclasses.asdict(loop) for loop in self.loops],
            "groups": list(groups),
        }

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the compiled schedule, or a typical step of each rank if it was measured.

        The schedule shows collectives by pack, matrix products, and the communication that these
        hide. A measured step shows computing, transfer and waiting.

        Args:
          path: a file to write; its suffix selects the format.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        try:
            from jaxcoll._report.picture import Schedule, draw_schedule, draw_step
        except ImportError as error:
            raise ImportError(
                "`Report.plot` needs matplotlib, which is not installed: "
                "pip install 'jaxcoll[cli]'."
            ) from error
        title = f"{self.title} on {self.where or pluralize(self.devices, 'device')}"
        if self.measured:
            figure = draw_step(title, totals(self.executed), self.measured)
        else:
            lines = [
                f"Compiled to {totals(self.executed)}: {describe_sent(self)} leave each device."
            ]
            if self.requested is not None:
                lines.insert(0, f"Requested {totals(self.requested)}.")
            fields = {name: getattr(self, name) for name in Schedule._fields}
            figure = draw_schedule(title, lines, Schedule(**fields))
        if path is not None:
            figure.savefig(path, format=Path(path).suffix[1:] or "png")
        return figure

    def text(self, width: int = WIDTH) -> str:
        """The headline, a line for each compiled collective, dropped collectives, and notes."""
        parts = [fold(line, width) for line in _heading(self)]
        if self.rows:
            parts.append(table(self.rows, self.measured).text(width))
        if self.dropped:
            parts.append("\n".join(shorten(line, width) for line in _list_dropped(self)))
        return "\n\n".join([*parts, *(fold(note, width) for note in _notes(self))])

    def __str__(self) -> str:
        return self.text()


def _heading(report: Report) -> list[str]:
    headline = f"{report.title}, {report.where or pluralize(report.devices, 'device')}: "
    if report.requested is not None:
        headline += f"requested {totals(report.requested)}; compiled: "
    headline += totals(report.executed)
    if report.rows:
        headline += f", {', '.join(_dtypes(report))}; {describe_sent(report)} wire bytes per device"
    lines = [headline]
    if shares := report.overlap.shares:
        overlapped = ", ".join(
            f"{percent(share.behind, share.nbytes)} of {least(*report.collectives)}"
            f"{size(share.nbytes)} " + ("sent" if len(shares) == 1 else f"in {share.kind}")
            for share in shares
        )
        flops = report.overlap.flops
        products = f"matrix products ({scale(flops)}FLOP)" if flops else "matrix products"
        lines.append(f"overlapped with {products}: {overlapped}{_prediction(report)}")
    if report.memory_bytes is not None:
        lines.append(f"memory: at most {size(report.memory_bytes)} per device")
    if measured := report.measured:
        lines[1:1] = [*measured.sentences(report.rows), measured.summary()]
    return lines


def describe_sent(report: Report) -> str:
    """Format the wire bytes of one run, marked if they are a lower bound."""
    mark = "≥ " if report.unread else least(*report.executed)
    return mark + size(wire_bytes(report.executed))


def _prediction(report: Report) -> str:
    seconds, exposed = report.seconds, report.exposed_seconds
    if seconds is None:
        return ""
    prediction = f"; predicted {least(*report.collectives)}{milliseconds(seconds)} of communication"
    if exposed is None or not seconds:
        return prediction
    if exposed == seconds:
        return f"{prediction}, all exposed"
    return f"{prediction}, {milliseconds(exposed)} exposed ({percent(exposed, seconds)})"


def _dtypes(report: Report) -> list[str]:
    return sorted({dtype for c in report.collectives for dtype in c.dtypes})


def _list_dropped(report: Report) -> list[str]:
    requested, dropped = report.requested or (), report.dropped
    lines = [
        f"  {r.kind}  {','.join(r.dtypes)}  {size(r.nbytes)}  "
        f"{strip_folders(r.source)}  {r.op_name}".rstrip()
        for r in (requested[i] for i in dropped[:MOST])
    ]
    more = [f"  … and {len(dropped) - MOST} more"] * (len(dropped) > MOST)
    title = "requested, but not found in the compiled program:"
    return [title, *(shorten(line, WIDTH) for line in lines), *more] if lines else []


def _notes(report: Report) -> list[str]:
    unknown = {loop for c in report.executed if c.trips is None for loop in c.loops}
    known = {loop for loop in report.unbounded if loop not in unknown}
    uncounted = [
        f"not counted: {note}"
        for note in report.uncounted
        if not any(note.startswith(f"loop {loop!r} ") for loop in known)
    ]
    return [*uncounted, *(f"note: {note}" for note in report.notes)]


def side_by_side(reports: Mapping[str, Report]) -> str:
    """Make a table with a column for each program, and their ratio if there are two."""
    columns = [_figures(report) for report in reports.values()]
    is_pair = len(columns) == 2
    lines = []
    for figure in columns[0]:
        cells, numbers = zip(*(column[figure] for column in columns), strict=True)
        if any(cells):
            has_ratio = is_pair and numbers[0] is not None and numbers[1]
            ratio = f"{numbers[0] / numbers[1]:.2f}" if has_ratio else ""
            lines.append((figure, *(cell or "–" for cell in cells), *[ratio] * is_pair))
    names = ["", *reports, *["ratio"] * is_pair]
    return Table(tuple(names), "<" + ">" * (len(names) - 1), lines).text()


def _figures(report: Report) -> dict[str, tuple[str, float | None]]:
    """Format each figure; add its number if a ratio of it is meaningful."""
    payload = sum(c.turns * c.nbytes for c in report.executed)
    mark, often = least(*report.executed), runs(report.executed)
    before = sum(r.turns for r in report.requested or ())
    requested = "" if report.requested is None else pluralize(before, "collective")
    reduced, exposed, seconds = report.overlap.reduced, report.exposed_seconds, report.seconds
    flops = report.overlap.flops
    overlapped = percent(reduced.behind, reduced.nbytes) if reduced.nbytes else ""
    share = percent(exposed, seconds) if exposed is not None and seconds else ""
    asynchronous = sum(c.turns for c in report.collectives if c.is_async)
    return {
        "requested": (requested, None),
        "compiled, per run": (mark + pluralize(often, "collective"), often),
        "asynchronous": (f"{asynchronous:,}", None),
        "payload per device": (mark + size(payload), payload),
        "wire bytes per device": (describe_sent(report), wire_bytes(report.executed)),
        "dtypes on the wire": (", ".join(_dtypes(report)), None),
        "reductions overlapped": (overlapped, None),
        "overlapping products": (f"{scale(flops)}FLOP" if flops else "0", flops),
        "predicted communication": ("" if seconds is None else milliseconds(seconds), seconds),
        "exposed communication": ("" if exposed is None else milliseconds(exposed), exposed),
        "exposed share": (share, None),
    }


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Spend no time on garbage, which parsed text makes none of, between many new objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_pause_garbage_collection()
def make_report(
    compiled: str,
    requested: str | None = None,
    plans: Sequence[Plan] = (),
    where: str = "",
    rates: Rates | None = None,
    memory: Mapping[str, int] | None = None,
) -> Report:
    """Make a report from compiled HLO text, and the HLO text it was compiled from, if known.

    `memory` maps XLA's names (argument, output, alias, temp) to bytes on one device; alias is the
    results that reuse an argument's buffer.
    """
    program = read_hlo(compiled)
    lowered = None if requested is None else read_hlo(requested, program.devices)
    collectives = None if lowered is None else lowered.collectives
    unread = [f"in the requested program: {note}" for note in (lowered.unread if lowered else ())]
    fields = program._asdict()
    del fields["collectives"]
    fields["notes"] = (*program.notes, *unread)
    needed = ("argument", "output", "temp")
    return Report(
        **fields,
        where=where,
        requested=collectives,
        rows=make_rows(program, collectives, plans, rates),
        overlap=add_overlap(program.collectives, program.matmuls),
        predicted_from="" if rates is None else rates.source,
        memory_bytes=sum(memory[x] for x in needed) - memory["alias"] if memory else None,
        plans=tuple(plans),
    )
