"""All programs of a script that communicate: a report for each, and one table of them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll._observe.measured import compare
from jaxcoll._observe.parse.hlo_text import parse_module
from jaxcoll._observe.profile import Compiled, Event
from jaxcoll._observe.rank_times import programs_of, times_of
from jaxcoll._observe.report import Report, report_of
from jaxcoll._observe.row_table import lines_of, table, totals
from jaxcoll._show.table import Shown, Table
from jaxcoll._show.units import WIDTH, counted, fold, milliseconds, percent, size

_METADATA = re.compile(r", metadata=\{[^}]*\}")


@dataclasses.dataclass
class Programs(Shown):
    """The programs that were compiled while `jc.inspecting` watched, and communicate.

    `print(programs)` is a table with a line for each, `to_json()` has all of it for machines, and
    `plot()` draws the one that sends most.

    Attributes:
      reports: a `Report` for each, in the order of compilation.
      quiet: programs without collectives; they are counted only.
      notes: what was not measured or did not answer, and why.
    """

    reports: tuple[Report, ...] = ()
    quiet: int = 0
    notes: tuple[str, ...] = ()

    @property
    def late(self) -> list[str]:
        """The ranks that came late, in words; empty if none did, or nothing was measured."""
        return [
            f"{report.name}: {line}"
            for report in self.reports
            if report.measured
            for line in report.measured.sentences(report.rows)
        ]

    def text(self, width: int = WIDTH) -> str:
        """Return late ranks, the table of programs, notes, and what each took if that is known."""
        parts = [fold(line, width) for line in self.late]
        if self.reports:
            parts.append(self._table().text(width))
        if notes := self._notes():
            parts.append("\n".join(fold(note, width) for note in notes))
        for report in self.reports:
            if took := report.measured:
                parts.append(fold(f"{report.name}: {took.summary()}", width))
                parts.append(table(report.rows, took).text(width))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Return the reports, the count of other programs and the notes, in plain values."""
        reports = [report.to_dict() for report in self.reports]
        return {"programs": reports, "quiet": self.quiet, "notes": self.notes, "late": self.late}

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the program that sends most, as `Report.plot` does.

        Raises:
          ValueError: no program communicates.
        """
        if not self.reports:
            raise ValueError("there is no picture: no program with collectives was compiled.")
        # All that was measured before anything that was not.
        most = max(self.reports, key=lambda report: (bool(report.measured), report.wire_bytes))
        return most.plot(path)

    def _notes(self) -> list[str]:
        quiet = f"{counted(self.quiet, 'program')} without collectives."
        if not self.reports:
            return [f"No program with collectives was compiled; {quiet}", *self.notes]
        return [*[quiet] * bool(self.quiet), *self.notes]

    def _table(self) -> Table:
        columns = ("program", "calls", "collectives of a run", "wire bytes", "behind products")
        rows = [
            (
                report.name,
                "–" if report.calls is None else f"{report.calls:,}",
                totals(report.collectives),
                ("≥ " if report.uncounted else "") + size(report.wire_bytes),
                percent(sum(s.behind for s in shares), sum(s.nbytes for s in shares)),
                *_steps(report),
            )
            for report in self.reports
            for shares in [report.overlap.shares]
        ]
        if any(report.measured for report in self.reports):
            columns += ("step", "exposed")
        rows = [row[: len(columns)] for row in rows]
        below = [", ".join(lines_of(report.rows, 4)) for report in self.reports]
        return Table(columns, "<><" + ">" * (len(columns) - 3), rows, below)


def _steps(report: Report) -> tuple[str, str]:
    took = report.measured
    if took is None:
        return "–", "–"
    exposed = percent(took.exposed_seconds, took.step_seconds)
    return milliseconds(took.step_seconds), exposed


def read_rank(
    compiled: Iterable[Compiled], events: Sequence[Event], probe: Sequence[Event], most: int
) -> tuple[dict[str, Report], dict[str, Any]]:
    """Read what one process compiled and recorded: reports, and the last runs in plain values.

    Between the end of the `probe`, an earlier profile, and the events of the other the step's time
    is that without a profile.
    """
    reports: dict[str, Report] = {}
    numbers: dict[str, set[int]] = defaultdict(set)
    for program in compiled:
        key = _fingerprint(program.text)
        reports[key] = dataclasses.replace(report_of(program.text), calls=program.calls)
        if program.number is not None:
            numbers[key].add(program.number)
    during, notes = programs_of(reports, numbers, events)
    before, _ = programs_of(reports, numbers, probe)
    rows: dict[str, Any] = {}
    for key, report in reports.items():
        times = times_of(report, during[key], most) if key in during else None
        first = times_of(report, before[key], most) if key in before else None
        if times and first and (runs := times["runs"][0] - first["runs"][-1]) > 0:
            times["outside"] = (times["starts"][0] - first["starts"][-1]) / runs
        rows[key] = {"name": report.name, "calls": report.calls, "times": times}
    return reports, {"programs": rows, "notes": notes}


def programs_from(
    reports: Mapping[str, Report], ranks: Mapping[int, dict[str, Any]], quiet: int
) -> Programs:
    """Lay the rows of all ranks together under one rank's reports."""
    ranks_of: dict[str, list[str]] = {}
    for rank, rows in ranks.items():
        others = {row["name"] for key, row in rows["programs"].items() if key not in reports}
        other = [f"compiled other programs: {', '.join(sorted(others))}."] if others else []
        for note in rows["notes"] + other:
            ranks_of.setdefault(note, []).append(str(rank))
    notes = [
        note if len(own) == len(ranks) else f"rank{'s' * (len(own) > 1)} {', '.join(own)}: {note}"
        for note, own in ranks_of.items()
    ]
    together = []
    for key, report in reports.items():
        times = {
            rank: rows["programs"][key]["times"]
            for rank, rows in ranks.items()
            if rows["programs"].get(key, {}).get("times")
        }
        measured = compare(report.rows, times) if times else None
        if times and not measured:
            those = ", ".join(map(str, times))
            notes.append(
                f"{report.name}: not measured: no run is in the profiles of ranks {those}."
            )
        together.append(dataclasses.replace(report, measured=measured))
    return Programs(tuple(together), quiet, tuple(notes))


def _fingerprint(text: str) -> str:
    """Return what is the same on all ranks: numbers of modules and names of files are not."""
    digest = hashlib.sha256()
    for name, lines in (module := parse_module(text)).computations.items():
        digest.update(_METADATA.sub("", "\n".join([module.name, name, *lines])).encode())
    return digest.hexdigest()[:16]
