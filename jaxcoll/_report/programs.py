"""The communicating programs of a script: a report for each, and one table of all."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxcoll._hlo.hlo_text import parse_module
from jaxcoll._report.measured import compare
from jaxcoll._report.profile.matching import Candidate, match_programs
from jaxcoll._report.profile.profile import Compiled, Profile, read_profile
from jaxcoll._report.profile.rank_times import time_runs
from jaxcoll._report.report import Report, describe_sent, make_report
from jaxcoll._report.row_table import list_lines, table, totals
from jaxcoll._show.table import Shown, Table
from jaxcoll._show.units import WIDTH, fold, milliseconds, percent, pluralize, shorten

_METADATA = re.compile(r", metadata=\{[^}]*\}")


@dataclasses.dataclass
class Programs(Shown):
    """The communicating programs that were compiled while `jc.inspecting` watched.

    `print(programs)` shows a table with a line for each, `to_json()` is for machines, and `plot()`
    draws the program that sends the most bytes.

    Attributes:
      reports: a `Report` for each, in the order of compilation.
      quiet: the number of programs without collectives, which have no report.
      notes: programs that were not measured and ranks that did not answer, with the reasons.
      unread: notes on programs and saved profiles that could not be read, with the reasons.
    """

    reports: tuple[Report, ...] = ()
    quiet: int = 0
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def late(self) -> list[str]:
        """A sentence for each rank that arrived late; empty if nothing was measured."""
        return [
            f"{report.title}: {line}"
            for report in self.reports
            if report.measured
            for line in report.measured.sentences(report.rows)
        ]

    def text(self, width: int = WIDTH) -> str:
        """Print late ranks, the table of programs, notes, and the measured times of each."""
        parts = [fold(line, width) for line in self.late]
        if self.reports:
            parts.append(self._table().text(width))
        if notes := self._notes():
            parts.append("\n".join(fold(note, width) for note in notes))
        for report in self.reports:
            if measured := report.measured:
                parts.append(fold(f"{report.title}: {measured.summary()}", width))
                parts.append(table(report.rows, measured).text(width))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Convert the reports, and what else is known, into plain values."""
        reports = [report.to_dict() for report in self.reports]
        names = ("quiet", "notes", "late", "unread")
        return {"programs": reports, **{name: getattr(self, name) for name in names}}

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the program that sends the most bytes, with `Report.plot`; measured ones first.

        Raises:
          ValueError: no program communicates.
        """
        if not self.reports:
            raise ValueError("nothing to draw: no program with collectives was compiled.")
        most = max(self.reports, key=lambda report: (bool(report.measured), report.wire_bytes))
        return most.plot(path)

    def _notes(self) -> list[str]:
        quiet = f"{pluralize(self.quiet, 'program')} without collectives."
        if not self.reports:
            return [f"No program with collectives was compiled; {quiet}", *self.notes]
        return [*[quiet] * bool(self.quiet), *self.notes]

    def _table(self) -> Table:
        columns = ("program", "calls", "collectives per run", "wire bytes", "overlapped")
        rows = [
            (
                report.title,
                "–" if report.calls is None else f"{report.calls:,}",
                totals(report.executed),
                describe_sent(report),
                percent(sum(s.behind for s in shares), sum(s.nbytes for s in shares)),
                *_steps(report),
            )
            for report in self.reports
            for shares in [report.overlap.shares]
        ]
        if any(report.measured for report in self.reports):
            columns += ("step", "exposed")
        rows = [row[: len(columns)] for row in rows]
        below = [", ".join(list_lines(report.rows, 4)) for report in self.reports]
        return Table(columns, "<><" + ">" * (len(columns) - 3), rows, below)


def _steps(report: Report) -> tuple[str, str]:
    measured = report.measured
    if measured is None:
        return "–", "–"
    exposed, step = measured.exposed_seconds, measured.step_seconds
    if step is None:
        return "–", milliseconds(exposed)
    return milliseconds(step), percent(exposed, step)


def read_rank(
    compiled: Iterable[Compiled], profile: Profile, most: int
) -> tuple[dict[str, Report], dict[str, Any]]:
    """Read one process's reports by fingerprint, and the times of their last runs.

    Times are those of at most `most` runs, in plain values.
    """
    candidates: dict[str, Candidate] = {}
    unread: list[str] = []
    for program in compiled:
        try:
            key = fingerprint(program.text)
            report = dataclasses.replace(make_report(program.text), calls=program.calls)
        except ValueError as error:
            unread.append(f"not read: {shorten(program.text.partition(',')[0], 80)}: {error}")
            continue
        # A program with an instruction that cannot be read may communicate, too.
        if report.rows or report.unread:
            # A step that is compiled again, to the same text, runs under another number.
            others = candidates[key].numbers if key in candidates else frozenset()
            numbers = others | {n for n in [program.number] if n is not None}
            candidates[key] = Candidate(report, program, numbers)
    during, notes = match_programs(candidates, profile)
    rows: dict[str, Any] = {}
    for key, candidate in candidates.items():
        times = None
        if key in during:
            names = candidate.names
            times = time_runs(candidate.report, names, during[key], profile.backend, most)
        name, calls = candidate.report.name, candidate.report.calls
        rows[key] = {"name": name, "calls": calls, "times": times}
    away = [key for key, candidate in candidates.items() if not candidate.program.runs_here]
    if away:
        names = ", ".join(rows[key]["name"] for key in away)
        notes.append(
            f"{names}: this process has none of its devices, and does no part of it. If it should, "
            "make the mesh from all of `jax.devices()`."
        )
    if profile.executions:
        if idle := [row["name"] for k, row in rows.items() if not row["times"] and k not in away]:
            notes.append(
                f"{', '.join(idle)}: not measured: no run is whole in the profile: record several."
            )
    elif profile.is_there and not (away and len(away) == len(rows)):
        advice = profile.backend.advice
        notes.append(f"not measured: the profile has no executions of instructions: {advice}.")
    reports = {key: candidate.report for key, candidate in candidates.items()}
    return reports, {"programs": rows, "notes": [*notes, *unread], "unread": unread}


def count_runs(profile: bytes, compiled: Iterable[Compiled]) -> tuple[int, int]:
    """Count a profile's executions of instructions, and its runs of the program that ran longest.

    Only runs that `read_rank` would measure count.
    """
    read = read_profile(profile)
    _, rows = read_rank(compiled, read, read.events)
    times = [row["times"] for row in rows["programs"].values() if row["times"]]
    longest = max(times, key=lambda one: one["ends"][-1] - one["starts"][0], default={"runs": ()})
    return read.events, len(longest["runs"])


def programs_from(
    reports: Mapping[str, Report], ranks: Mapping[int, dict[str, Any]], quiet: int
) -> Programs:
    """Add the measured times of all ranks to one rank's reports."""
    ranks_of: dict[str, list[str]] = {}  # by note
    for rank, rows in ranks.items():
        others = {row["name"] for key, row in rows["programs"].items() if key not in reports}
        other = [f"compiled other programs: {', '.join(sorted(others))}."] if others else []
        for note in rows["notes"] + other:
            ranks_of.setdefault(note, []).append(str(rank))
    notes = [
        note
        if len(some) == len(ranks)
        else f"rank{'s' * (len(some) > 1)} {', '.join(some)}: {note}"
        for note, some in ranks_of.items()
    ]
    merged = []
    for key, report in reports.items():
        times = {
            rank: rows["programs"][key]["times"]
            for rank, rows in ranks.items()
            if rows["programs"].get(key, {}).get("times")
        }
        measured = compare(report.rows, times) if times else None
        if times and not measured:
            names = ", ".join(map(str, times))
            notes.append(
                f"{report.name}: not measured: the profiles of ranks {names} share no run."
            )
        if (
            measured
            and (recorded := sum(row["devices"] for row in times.values())) < report.devices
        ):
            notes.append(
                f"{report.name}: measured on {recorded} of its {report.devices} devices; the "
                "profiles here lack the others."
            )
        merged.append(dataclasses.replace(report, measured=measured))
    return Programs(tuple(merged), quiet, tuple(notes))


def fingerprint(text: str) -> str:
    """Make a hash that is the same on all ranks: without module numbers and file names."""
    digest = hashlib.sha256()
    for name, lines in (module := parse_module(text)).computations.items():
        digest.update(_METADATA.sub("", "\n".join([module.name, name, *lines])).encode())
    return digest.hexdigest()[:16]
