"""One report: what a program requests, what is compiled of that, and what is sent."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll._observe.measured import Measured
from jaxcoll._observe.overlap import Overlap, overlap
from jaxcoll._observe.parse.collective import Collective, Groups, Loop, Matmul, runs, wire_bytes
from jaxcoll._observe.parse.hlo import read_hlo
from jaxcoll._observe.row_table import MOST, table, totals, without_folders
from jaxcoll._observe.rows import Row, rows_of
from jaxcoll._plan.plan import Plan
from jaxcoll._prices.rates import Rates
from jaxcoll._show.table import Shown, Table
from jaxcoll._show.units import WIDTH, counted, fold, milliseconds, percent, scaled, shortened, size

_FIGURES = (
    "name", "where", "devices", "instructions", "count", "runs", "wire_bytes",
    "requested_wire_bytes", "memory_bytes", "overlapped", "seconds", "exposed_seconds",
    "predicted_from", "unread", "unbounded", "notes", "dropped", "calls",
)  # fmt: skip
"""Attributes that JSON has as they are."""


@dataclasses.dataclass(frozen=True)
class Report(Shown):
    """Requested, compiled and measured: every collective of a program.

    `print(report)` is a table, `report.plot()` a picture of the schedule or of what was measured,
    `report.to_json()` the same for machines; made by `jc.inspect` and `jc.inspecting`.

    Attributes:
      name: what was compiled, as in jit_step.
      where: the topology it was compiled for; "" if not known.
      devices: how many devices it is for.
      requested: what the program asks for, as it was lowered; None if only compiled text is known.
      rows: a `Row` for each compiled collective, in the order of the schedule; an asynchronous
        pair is one.
      matmuls: the instructions that multiply matrices.
      loops: the loops that collectives or matrix products stand in.
      instructions: of one run, the body of each loop once.
      overlap: bytes and operations that the schedule puts side by side.
      unread: what may send and is not understood, in words.
      unbounded: loops that send, and do not say how often they turn, by name; they count one turn.
      notes: what else is not known, and what should not be so.
      predicted_from: the source of the prices that seconds are predicted from; "" if none are.
      memory_bytes: what the program takes of one device at most: arguments, results that take no
        argument's place, and all temporary memory; None if that is not known.
      plans: the plans of the reductions by jaxcoll, in order.
      calls: how often Python called it while it was watched; None if that is not known.
      measured: what it took, and which rank came late; None if it was not measured.
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
    def count(self) -> int:
        """Collectives of the compiled program, each once however often its loop turns."""
        return len(self.rows)

    @property
    def runs(self) -> int:
        """Collectives that one run carries out; a loop that does not say counts one turn."""
        return runs(self.collectives)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device when the program runs once.

        They are what a byte-optimal implementation of each collective sends. A loop that does
        not say how often it turns counts one turn, and `uncounted` says so.
        """
        return wire_bytes(self.collectives)

    @property
    def requested_wire_bytes(self) -> int | None:
        """Likewise, of the program as it was requested; None if that is not known."""
        return None if self.requested is None else wire_bytes(self.requested)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Whatever may send beyond the figures, and why; empty if nothing is left out."""
        turns = "does not say how often it turns: what it sends is counted for one turn."
        return (*self.unread, *(f"loop {name!r} {turns}" for name in self.unbounded))

    @property
    def dropped(self) -> tuple[int, ...]:
        """Positions in `requested` of which nothing is seen in the compiled program."""
        matched = {i for row in self.rows for i in row.requested}
        return tuple(i for i in range(len(self.requested or ())) if i not in matched)

    @property
    def overlapped(self) -> float | None:
        """Share of the reduced bytes that travel behind matrix products; None if none is reduced.

        Counted are all-reduces and reduce-scatters, loops' turns included; behind products are
        those in asynchronous collectives with a product scheduled between their start and end.
        """
        reduced = self.overlap.reduced
        return reduced.behind / reduced.nbytes if reduced.nbytes else None

    @property
    def seconds(self) -> float | None:
        """Predicted communication of one run; None without a prediction."""
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
        """The report in plain numbers and strings, bytes and elements counted on one device."""
        groups: dict[Groups, int] = {}  # each once; they are long

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
        """Draw the compiled schedule, or a typical step of each rank where that was measured.

        The schedule has collectives by pack, matrix products, and what these hide; a step has
        computing, transfer and waiting.

        Args:
          path: a file to write, its ending saying the format.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        try:
            picture = importlib.import_module("jaxcoll._observe.picture")
        except ImportError as error:
            raise ImportError(
                "`Report.plot` needs matplotlib, which is not installed: "
                "pip install 'jaxcoll[cli]'."
            ) from error
        figure = picture.plot(self)
        if path is not None:
            figure.savefig(path, format=Path(path).suffix[1:] or "png")
        return figure

    def text(self, width: int = WIDTH) -> str:
        """The headline, a line for each compiled collective, what was dropped, and the notes."""
        parts = [fold(line, width) for line in _heading(self)]
        if self.rows:
            parts.append(table(self.rows, self.measured).text(width))
        if self.dropped:
            parts.append("\n".join(shortened(line, width) for line in _dropped(self)))
        return "\n\n".join([*parts, *(fold(note, width) for note in _notes(self))])

    def __str__(self) -> str:
        return self.text()


def _heading(report: Report) -> list[str]:
    """Return what is known of the whole program, each in a sentence; the first is the headline."""
    least = "at least " if report.uncounted else ""
    headline = f"{report.name}, {report.where or counted(report.devices, 'device')}: "
    if report.requested is not None:
        headline += f"requested {totals(report.requested)}; compiled: "
    headline += totals(report.collectives)
    if report.rows:
        headline += f", {', '.join(_dtypes(report))}; {least}{size(report.wire_bytes)}"
        headline += " wire bytes a device"
    lines = [headline]
    if shares := report.overlap.shares:
        behind = ", ".join(
            f"{percent(share.behind, share.nbytes)} of {size(share.nbytes)} "
            + ("sent" if len(shares) == 1 else f"in {share.kind}")
            for share in shares
        )
        flops = report.overlap.flops
        beside = f", {scaled(flops)}FLOP of them" if flops else ""
        lines.append(f"behind matrix products: {behind}{beside}{_prediction(report)}")
    if report.memory_bytes is not None:
        lines.append(f"memory: {size(report.memory_bytes)} of a device at most")
    if took := report.measured:
        lines[1:1] = [*took.sentences(report.rows), took.summary()]
    return lines


def _prediction(report: Report) -> str:
    seconds, exposed = report.seconds, report.exposed_seconds
    if seconds is None:
        return ""
    words = f"; predicted {milliseconds(seconds)} of communication"
    if exposed is None or not seconds:
        return words
    if exposed == seconds:
        return f"{words}, all exposed"
    return f"{words}, {milliseconds(exposed)} exposed ({percent(exposed, seconds)})"


def _dtypes(report: Report) -> list[str]:
    return sorted({dtype for c in report.collectives for dtype in c.dtypes})


def _dropped(report: Report) -> list[str]:
    requested, dropped = report.requested or (), report.dropped
    lines = [
        f"  {r.kind}  {','.join(r.dtypes)}  {size(r.nbytes)}  "
        f"{without_folders(r.source)}  {r.op_name}".rstrip()
        for r in (requested[i] for i in dropped[:MOST])
    ]
    more = [f"  … and {len(dropped) - MOST} more"] * (len(dropped) > MOST)
    title = "requested, and not seen in the compiled program:"
    return [title, *(shortened(line, WIDTH) for line in lines), *more] if lines else []


def _notes(report: Report) -> list[str]:
    uncounted = [f"not counted: {note}" for note in report.uncounted]
    return [*uncounted, *(f"note: {note}" for note in report.notes)]


def side_by_side(reports: Mapping[str, Report]) -> str:
    """Return a table of programs: a line for each figure, and the ratio where there are two."""
    columns = [_figures(report) for report in reports.values()]
    is_pair = len(columns) == 2
    lines = []
    for figure in columns[0]:
        cells, numbers = zip(*(column[figure] for column in columns), strict=True)
        if any(cells):
            has_ratio = is_pair and numbers[0] is not None and numbers[1]
            ratio = f"{numbers[0] / numbers[1]:.2f}" if has_ratio else ""
            lines.append((figure, *(cell or "–" for cell in cells), *[ratio] * is_pair))
    names = ["", *(shortened(name, 30) for name in reports), *["ratio"] * is_pair]
    return Table(tuple(names), "<" + ">" * (len(names) - 1), lines).text()


def _figures(report: Report) -> dict[str, tuple[str, float | None]]:
    """Return each figure in words, and as a number where a ratio says something."""
    sent = sum(c.turns * c.nbytes for c in report.collectives)
    before = sum(r.turns for r in report.requested or ())
    requested = "" if report.requested is None else counted(before, "collective")
    reduced, exposed, seconds = report.overlap.reduced, report.exposed_seconds, report.seconds
    flops = report.overlap.flops
    behind = percent(reduced.behind, reduced.nbytes) if reduced.nbytes else ""
    share = percent(exposed, seconds) if exposed is not None and seconds else ""
    asynchronous = sum(c.turns for c in report.collectives if c.is_async)
    return {
        "requested": (requested, None),
        "compiled, of one run": (counted(report.runs, "collective"), report.runs),
        "asynchronous of these": (f"{asynchronous:,}", None),
        "bytes put in a device": (size(sent), sent),
        "wire bytes a device": (size(report.wire_bytes), report.wire_bytes),
        "types on the wire": (", ".join(_dtypes(report)), None),
        "reduced behind products": (behind, None),
        "product FLOP beside them": (f"{scaled(flops)}FLOP" if flops else "0", flops),
        "predicted communication": ("" if seconds is None else milliseconds(seconds), seconds),
        "of it exposed": ("" if exposed is None else milliseconds(exposed), exposed),
        "share exposed": (share, None),
    }


def report_of(
    compiled: str,
    requested: str | None = None,
    plans: Sequence[Plan] = (),
    where: str = "",
    rates: Rates | None = None,
    memory: Mapping[str, int] | None = None,
) -> Report:
    """Read a report from texts alone: HLO, and the HLO that it was compiled from, if known.

    `memory` is bytes on one device of arguments, results, results that take an argument's place,
    and all that is temporary, by XLA's names.
    """
    program = read_hlo(compiled)
    before = None if requested is None else read_hlo(requested, program.devices)
    asked = None if before is None else before.collectives
    unread = [f"of what was requested: {note}" for note in (before.unread if before else ())]
    taken = ("argument", "output", "temp")
    read = program._asdict()
    del read["collectives"]
    read["notes"] = (*program.notes, *unread)
    return Report(
        **read,
        where=where,
        requested=asked,
        rows=rows_of(program, asked, plans, rates),
        overlap=overlap(program.collectives, program.matmuls),
        predicted_from="" if rates is None else rates.source,
        memory_bytes=sum(memory[x] for x in taken) - memory["alias"] if memory else None,
        plans=tuple(plans),
    )
