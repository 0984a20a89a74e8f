"""A report as a table for people, in plain text and in HTML, and two programs side by side."""

from __future__ import annotations

import html as _html
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePath

from jaxcoll._observe.parse.collective import Collective, Meanwhile
from jaxcoll._observe.report_data import ReportData
from jaxcoll._show.table import Table, folding_html, lines_html
from jaxcoll._show.units import (
    WIDTH,
    counted,
    fold,
    milliseconds,
    percent,
    scaled,
    shortened,
    size,
    some,
)

MOST = 40
"""Rows of each table; the rest are counted."""

COLUMNS = ("#", "kind", "from", "dtype", "bytes", "runs", "wire bytes", "meanwhile", "what became")


def text(report: ReportData, width: int = WIDTH) -> str:
    """The headline, a row for each compiled collective, what was dropped, and the notes."""
    lines = [headline(report), summary(report), memory(report)]
    parts = [fold(line, width) for line in lines if line]
    if report.count:
        parts.append(_table(report).text(width))
    if report.dropped:
        parts.append("\n".join(shortened(line, width) for line in _dropped(report)))
    return "\n\n".join([*parts, *(fold(note, width) for note in _notes(report))])


def html(report: ReportData) -> str:
    """The same as HTML, in the colours of the page that it stands in."""
    lines = [summary(report), memory(report)]
    beneath = "".join(f"<p>{_html.escape(line)}</p>" for line in lines if line)
    parts = []
    if report.count:
        compiled = counted(report.count, "compiled collective")
        parts.append(folding_html(compiled, _table(report).html()))
    if rest := [*_dropped(report), *_notes(report)]:
        parts.append(folding_html("notes", lines_html(rest, "white-space:pre-wrap")))
    return f"<div><p><b>{_html.escape(headline(report))}</b></p>{beneath}{''.join(parts)}</div>"


def _table(report: ReportData) -> Table:
    alike = like(report)
    rest = sum(map(len, alike[MOST:]))
    return Table(
        COLUMNS,
        "><><>>><<",
        [row(report, each) for each in alike[:MOST]],
        [shortened(beneath(report, each), 2 * WIDTH) for each in alike[:MOST]],
        f"… and {rest} more, in `report.collectives`" if rest else "",
    )


def headline(report: ReportData) -> str:
    """What was requested, what it was compiled to, and what leaves a device, in one sentence."""
    over = report.where or counted(report.devices, "device")
    asked = ""
    if report.requested is not None:
        asked = f"requested {totals(report.requested, report.trips)}; compiled: "
    made = totals(report.collectives, [c.trips for c in report.collectives])
    dtypes = sorted({dtype for c in report.collectives for dtype in c.dtypes})
    typed = f", {', '.join(dtypes)}" if dtypes else ""
    least = "at least " if report.uncounted else ""
    sent = f"{least}{size(report.wire_bytes)} wire bytes a device" if report.count else ""
    return f"{report.name}, {over}: {asked}{made}{typed}" + (f"; {sent}" if sent else "")


def summary(report: ReportData) -> str:
    """What travels behind matrix products, and what is predicted to be left; "" if nothing does."""
    shares = report.overlap.shares
    if not shares:
        return ""
    bytes_behind = [
        f"{percent(share.behind, share.nbytes)} of {size(share.nbytes)} "
        + ("sent" if len(shares) == 1 else f"in {kind}")
        for kind, share in shares.items()
    ]
    beside = f", {scaled(report.overlap.flops)}FLOP of them" * (report.overlap.flops > 0)
    text = f"behind matrix products: {', '.join(bytes_behind)}{beside}"
    if report.seconds is None:
        return text
    return f"{text}; predicted {milliseconds(report.seconds)} of communication{_left(report)}"


def _left(report: ReportData) -> str:
    if report.exposed_seconds is None or not report.seconds:
        return ""
    if report.exposed_seconds == report.seconds:
        return ", all exposed"
    share = percent(report.exposed_seconds, report.seconds)
    return f", {milliseconds(report.exposed_seconds)} exposed ({share})"


def memory(report: ReportData) -> str:
    """What the program takes of one device's memory; "" if that is not known."""
    found = report.memory_bytes
    return "" if found is None else f"memory: {size(found)} of a device at most"


def totals(collectives: Sequence[Collective], trips: Sequence[int | None]) -> str:
    """How many of which kind, and their bytes, each turn of a loop counted."""
    if not collectives:
        return "no collectives"
    kinds: Counter[str] = Counter()
    nbytes = 0
    for c, n in zip(collectives, trips, strict=True):
        turns = 1 if n is None else n
        kinds[c.kind] += turns
        nbytes += turns * c.nbytes
    return f"{', '.join(counted(n, kind) for kind, n in kinds.items())}, {size(nbytes)}"


def like(report: ReportData) -> list[list[int]]:
    """Positions in `report.collectives`, those together that would have the same row."""
    found: dict[tuple[str, ...], list[int]] = {}
    for k in range(report.count):
        found.setdefault((*row(report, [k])[1:], carried(report, k)), []).append(k)
    return list(found.values())


def row(report: ReportData, alike: Sequence[int]) -> tuple[str, ...]:
    """The cells of one collective, or of several that are alike in all that is shown."""
    c, origin = report.collectives[alike[0]], report.origins[alike[0]]
    known = report.requested is not None and origin.requested
    return (
        str(alike[0]),
        c.kind if len(alike) == 1 else f"{len(alike)} × {c.kind}",
        str(len(origin.requested)) + "?" * (origin.by == "order") if known else "–",
        ",".join(c.dtypes),
        size(c.nbytes),
        "?" if c.trips is None else f"{c.trips:,}",
        size(len(alike) * c.turns * c.wire_bytes),
        during(c.meanwhile),
        ", ".join(report.changes(alike[0])) or ("as requested" if known else ""),
    )


def carried(report: ReportData, k: int) -> str:
    """The packs and leaves of `report.collectives[k]`, and the line that asked for it."""
    packs = packs_in_words(report.packs_of(k))
    leaves = report.leaves_of(k)
    if leaves:
        packs += f" ({', '.join(leaf or 'the value' for leaf in some(leaves, 3))})"
    c = report.collectives[k]
    loop = f"in loop {c.loops[-1]}" if c.loops else ""
    lines = report.sources_of(k)
    where = ", ".join(some([_short(line) for line in lines], 2))
    return "  ".join(part for part in (where, packs, loop) if part)


def beneath(report: ReportData, alike: Sequence[int]) -> str:
    """What stands below a row: what it carries, and the kernels around it."""
    found = [kernels for k in alike if (kernels := report.collectives[k].kernels)]
    count, nbytes = sum(x.count for x in found), sum(x.nbytes for x in found)
    most = "at most " * (len(found) > 1)  # one may be around several of them
    often = " each time" * (report.collectives[alike[0]].trips != 1)
    words = f"{most}{counted(count, 'kernel')} around, {size(nbytes)} of memory{often}"
    around = words if count else ""
    return "  ".join(filter(None, (carried(report, alike[0]), around)))


def packs_in_words(packs: Sequence[str]) -> str:
    """Packs by their numbers, reduction by reduction.

    Examples:
      >>> packs_in_words([f"all_reduce_5f3a1c/pack{k}" for k in (1, 2, 3, 0, 7)])
      'packs 0-3, 7 of all_reduce_5f3a1c'
    """
    by_reduction: dict[tuple[str, str], list[int]] = {}
    for pack in packs:
        reduction, _, last = pack.partition("/")
        what, number = re.findall(r"[a-z]+|\d+", last)
        by_reduction.setdefault((reduction, what), []).append(int(number))
    found = []
    for (reduction, what), numbers in by_reduction.items():
        many = what + "s" * (what == "pack" and len(numbers) > 1)
        found.append(f"{many} {_ranges(sorted(numbers))} of {reduction}")
    return ", ".join(found)


def during(meanwhile: Meanwhile | None) -> str:
    """What runs between start and end, in a few words.

    Examples:
      >>> during(Meanwhile(14, 2, 1_240_000_000)), during(None)
      ('1.24 GFLOP, 14 ops', 'waits')
    """
    if meanwhile is None:
        return "waits"
    if not meanwhile.instructions:
        return "nothing"
    operations = counted(meanwhile.instructions, "op")
    return f"{scaled(meanwhile.flops)}FLOP, {operations}" if meanwhile.matmuls else operations


def against(report: ReportData, other: ReportData, name: str, other_name: str) -> str:
    """A table of two programs: a row for each figure, and the first's over the second's."""
    columns = ("", shortened(name, 30), shortened(other_name, 30), "ratio")
    rows, theirs = [], _figures(other)
    for figure, (words, number) in _figures(report).items():
        its_words, its_number = theirs[figure]
        if words or its_words:
            ratio = f"{number / its_number:.2f}" if number is not None and its_number else ""
            rows.append((figure, words or "–", its_words or "–", ratio))
    return Table(columns, "<>>>", rows).text()


def _figures(report: ReportData) -> dict[str, tuple[str, float | None]]:
    """Each in words, and as a number where a ratio says something."""
    found = report.collectives
    asynchronous = [c for c in found if c.is_async]
    asked = sum(1 if n is None else n for n in report.trips)
    sent = sum(c.turns * c.nbytes for c in found)
    dtypes = ", ".join(sorted({dtype for c in found for dtype in c.dtypes}))
    reduced, exposed, seconds = report.overlap.reduced, report.exposed_seconds, report.seconds
    flops = report.overlap.flops
    return {
        "requested": ("" if report.requested is None else counted(asked, "collective"), None),
        "compiled, of one run": (counted(report.runs, "collective"), report.runs),
        "asynchronous of these": (f"{sum(c.turns for c in asynchronous):,}", None),
        "bytes put in a device": (size(sent), sent),
        "wire bytes a device": (size(report.wire_bytes), report.wire_bytes),
        "types on the wire": (dtypes, None),
        "reduced behind products": (
            percent(reduced.behind, reduced.nbytes) if reduced.nbytes else "",
            None,
        ),
        "product FLOP beside them": (f"{scaled(flops)}FLOP" if flops else "0", flops),
        "predicted communication": ("" if seconds is None else milliseconds(seconds), seconds),
        "of it exposed": ("" if exposed is None else milliseconds(exposed), exposed),
        "share exposed": (
            percent(exposed, seconds) if exposed is not None and seconds else "",
            None,
        ),
    }


def _dropped(report: ReportData) -> list[str]:
    asked = report.requested or ()
    lines = [
        f"  {asked[i].kind}  {','.join(asked[i].dtypes)}  {size(asked[i].nbytes)}  "
        f"{_short(asked[i].source)}  {asked[i].op_name}".rstrip()
        for i in report.dropped[:MOST]
    ]
    more = [f"  … and {len(report.dropped) - MOST} more"] * (len(report.dropped) > MOST)
    title = "requested, and not seen in the compiled program:"
    return [title, *(shortened(line, WIDTH) for line in lines), *more] if lines else []


def _notes(report: ReportData) -> list[str]:
    uncounted = [f"not counted: {note}" for note in report.uncounted]
    return [*uncounted, *(f"note: {note}" for note in report.notes)]


def _ranges(numbers: Sequence[int]) -> str:
    """Runs of numbers as first-last."""
    # In a run a number and its place grow alike.
    found = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = ([n for _, n in run] for _, run in found)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _short(source: str) -> str:
    """file:line without the folders."""
    return PurePath(source.replace("\\", "/")).name
