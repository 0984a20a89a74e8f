"""What a schedule hides in a sentence, and two programs side by side."""

from __future__ import annotations

from jaxcoll._observe.report_data import ReportData
from jaxcoll._show.table import Table
from jaxcoll._show.units import counted, milliseconds, percent, scaled, shortened, size


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
