"""What a schedule hides in a sentence, and two programs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcoll._observe.report_data import ReportData
from jaxcoll._show.table import Table
from jaxcoll._show.units import counted, milliseconds, percent, scaled, shortened, size


def summary(report: ReportData) -> str:
    """What travels behind matrix products, and what is predicted to be left; "" if nothing does."""
    shares = report.overlap.shares
    if not shares:
        return ""
    bytes_behind = [
        f"{percent(share.behind, share.nbytes)} of {size(share.nbytes)} {_in(kind, len(shares))}"
        for kind, share in shares.items()
    ]
    beside = f", {scaled(report.overlap.flops)}FLOP of them" * (report.overlap.flops > 0)
    text = f"behind matrix products: {', '.join(bytes_behind)}{beside}"
    if report.seconds is None:
        return text
    return f"{text}; predicted {milliseconds(report.seconds)} of communication{_left(report)}"


def _in(kind: str, kinds: int) -> str:
    return "sent" if kinds == 1 else f"in {kind}"


def _left(report: ReportData) -> str:
    if report.exposed_seconds is None or not report.seconds:
        return ""
    if report.exposed_seconds == report.seconds:
        return ", all exposed"
    share = percent(report.exposed_seconds, report.seconds)
    return f", {milliseconds(report.exposed_seconds)} exposed ({share})"


def against(report: ReportData, other: ReportData, name: str, other_name: str) -> str:
    """A table of two programs: a row for each figure, and the first's over the second's."""
    columns = ("", shortened(name, 30), shortened(other_name, 30), "ratio")
    rows = []
    for figure, mine, its in zip(_FIGURES, _figures(report), _figures(other), strict=True):
        if mine[0] or its[0]:
            rows.append((figure, mine[0] or "–", its[0] or "–", _ratio(mine[1], its[1])))
    return Table(columns, "<>>>", rows).text()


_FIGURES = (
    "requested",
    "compiled, of one run",
    "asynchronous of these",
    "bytes put in a device",
    "wire bytes a device",
    "types on the wire",
    "reduced behind products",
    "product FLOP beside them",
    "predicted communication",
    "of it exposed",
    "share exposed",
)


def _figures(report: ReportData) -> list[tuple[str, float | None]]:
    """Each in words, and as a number where a ratio says something."""
    found = report.collectives
    asynchronous = [c for c in found if c.is_async]
    asked = report.requested
    sent = sum(c.turns * c.nbytes for c in found)
    dtypes = ", ".join(sorted({dtype for c in found for dtype in c.dtypes}))
    reduced, exposed, seconds = report.overlap.reduced, report.exposed_seconds, report.seconds
    flops = report.overlap.flops
    return [
        ("" if asked is None else counted(_requested(report), "collective"), None),
        (counted(report.runs, "collective"), report.runs),
        (f"{sum(c.turns for c in asynchronous):,}", None),
        (size(sent), sent),
        (size(report.wire_bytes), report.wire_bytes),
        (dtypes, None),
        (percent(reduced.behind, reduced.nbytes) if reduced.nbytes else "", None),
        (f"{scaled(flops)}FLOP" if flops else "0", flops),
        ("" if seconds is None else milliseconds(seconds), seconds),
        ("" if exposed is None else milliseconds(exposed), exposed),
        (percent(exposed, seconds) if exposed is not None and seconds else "", None),
    ]


def _requested(report: ReportData) -> int:
    trips: Sequence[int | None] = [
        report.requested_trips(i) for i in range(len(report.requested or ()))
    ]
    return sum(1 if n is None else n for n in trips)


def _ratio(mine: float | None, its: float | None) -> str:
    return f"{mine / its:.2f}" if mine is not None and its else ""
