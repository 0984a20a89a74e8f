"""The pictures of a report: the compiled schedule, what it hides, and both over predicted time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from jaxcoll._observe.overlap import exposed, predicted
from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.report_data import ReportData
from jaxcoll._observe.report_text import packs_in_words, totals
from jaxcoll._observe.timeline import Timeline
from jaxcoll._observe.timeline import timeline as play
from jaxcoll._show.style import COLOURS, FAINT, INK, LINE, PALE, bare, legend, page
from jaxcoll._show.units import counted, milliseconds, percent, scaled, size

PRODUCTS, BUSY = "#b9c1cc", "#3d4a5c"
LEFT, RIGHT = 0.105, 0.965
MOST_LANES = 14
WAITS = "#e2725b"
CARRIES = (COLOURS[0], "#6fb3c4")
PANEL = 2.45
TOP, BOTTOM = 1.0, 0.75
"""Inches: of each panel, and of what is above and below all."""
_LOOKS = (
    ("■", INK, "beside a matrix product", 0.152),
    ("■", "#a5a8ae", "asynchronous, beside none", 0.172),
    ("□", INK, "everything waits for it", 0.15),
)
_LANES = (
    ("■", BUSY, "matrix products", 0.125),
    ("■", CARRIES[0], "a collective has the links", 0.18),
    ("■", WAITS, "everything waits for one", 0.17),
    ("|", CARRIES[0], "started", 0.07),
    ("|", FAINT, "its end", 0.07),
)
"""What the looks of a collective mean, and the marks of a timeline."""


def plot(report: ReportData, seconds: Callable[[Collective], float] | None = None) -> Figure:
    """A figure of 1,920 × 1,080 pixels, of matplotlib's own kind: apart from pyplot's state.

    `seconds` predicts one collective; None: as `report.terms` do, or in wire bytes without them.
    """
    title = f"{report.name} on {report.where or counted(report.devices, 'device')}"
    figure = page(title, _subtitle(report))
    lanes = _lanes(report)
    legend(figure, LEFT, 0.811, _LOOKS)
    axes = figure.add_axes((LEFT, 0.29, RIGHT - LEFT, 0.49))
    _schedule(axes, report, lanes)
    _hidden(figure.add_axes((LEFT, 0.085, RIGHT - LEFT, 0.075)), report, seconds)
    return figure


def _subtitle(report: ReportData) -> str:
    made = totals(report.collectives, [c.trips for c in report.collectives])
    asked = ""
    if report.requested is not None:
        asked = f"Requested {totals(report.requested, report.trips)}."
    least = "at least " if report.uncounted else ""
    found = f"Compiled to {made}: {least}{size(report.wire_bytes)} leave each device."
    return (" " if len(asked + found) < 140 else "\n").join(filter(None, (asked, found)))


Lane = tuple[str, str, list[int]]
"""A label, a colour, and positions in `report.collectives`."""


def _lanes(report: ReportData) -> list[Lane]:
    """Collectives by the packs they carry, each kind apart; those that carry none by kind."""
    found: dict[str, list[int]] = {}
    several = len({c.kind for c in report.collectives}) > 1
    for k, c in enumerate(report.collectives):
        packs = packs_in_words(report.packs_of(k)).partition(" of ")[0]
        label = (f"{c.kind}\n{packs}" if several else packs) if packs else c.kind
        found.setdefault(label, []).append(k)
    lanes = list(found.items())
    if len(lanes) > MOST_LANES:
        rest = [k for _, ks in lanes[MOST_LANES - 1 :] for k in ks]
        lanes = [*lanes[: MOST_LANES - 1], (f"{len(lanes) - MOST_LANES + 1} more", sorted(rest))]
    return [(label, COLOURS[n % len(COLOURS)], ks) for n, (label, ks) in enumerate(lanes)]


def _schedule(axes: Axes, report: ReportData, lanes: Sequence[Lane]) -> None:
    """Instructions from left to right; below, what multiplies; above, what travels meanwhile."""
    end = max(report.instructions, 1)
    top = max(len(lanes) + 1.55, 4.5)
    text_size = 10 if len(lanes) < 11 else 9
    axes.set_xlim(0, end)
    axes.set_ylim(0, top)
    for loop in report.loops:
        span = Rectangle((loop.at, 0), loop.until - loop.at, top, color=PALE, zorder=0)
        axes.add_patch(span)
        turns = "?" if loop.trips is None else f"{loop.trips:,}"
        axes.text(
            loop.at + end * 0.004, top - 0.12, f"loop × {turns}", size=9, color=FAINT, va="top"
        )
    _products(axes, report)
    for n, (label, colour, ks) in enumerate(lanes):
        y = top - 0.8 - n
        axes.axhline(y, color=LINE, linewidth=0.8, zorder=1)
        beside = {"ha": "right", "va": "center", "size": text_size}
        axes.text(-end * 0.008, y, _label(label), color=colour, weight="bold", **beside)
        for k in ks:
            _span(axes, report.collectives[k], y, colour, end)
        _sizes(axes, report, ks, y, end)
    axes.text(-end * 0.008, 0.55, "matrix\nproducts", size=10, color=FAINT, ha="right", va="center")
    bare(axes, labelsize=10)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("instruction of the compiled schedule", color=FAINT, size=10, loc="right")


def _products(axes: Axes, report: ReportData) -> None:
    """A stroke for each product, as high as its share of the largest's arithmetic."""
    most = max((m.flops for m in report.matmuls), default=0)
    spans = [(c.at, c.until) for c in report.collectives if c.is_async]
    for m in report.matmuls:
        height = 0.12 + 0.88 * (m.flops / most if most else 0)
        beside = any(start < m.at < until for start, until in spans)
        colour = BUSY if beside else PRODUCTS
        axes.vlines(m.at + 0.5, 0.05, 0.05 + height, color=colour, linewidth=2.2, zorder=2)
    if report.matmuls:
        total = sum(m.turns * m.flops for m in report.matmuls)
        label = f"{scaled(total)}FLOP in {counted(len(report.matmuls), 'matrix product')}"
        axes.annotate(
            label, (0, 0), (0, -23), xycoords="axes fraction", textcoords="offset points",
            color=FAINT, size=10, va="center",
        )  # fmt: skip


def _span(axes: Axes, c: Collective, y: float, colour: str, end: int) -> None:
    """From start to end; one that everything waits for has no length, and is hollow."""
    tall = 0.26 + 0.34 * min(1.0, math.log10(max(c.wire_bytes, 1)) / 9)
    if c.is_async and c.until > c.at:
        hides = c.meanwhile is not None and c.meanwhile.flops > 0
        width, face, edge = max(c.until - c.at, end / 300), colour, "white"
        alpha = 1.0 if hides else 0.45
    else:
        width, face, edge, alpha = end / 220, "white", colour, 1.0
    axes.add_patch(
        Rectangle((c.at, y - tall / 2), width, tall, facecolor=face, edgecolor=edge, alpha=alpha,
                  linewidth=1.4, zorder=3)
    )  # fmt: skip


def _sizes(axes: Axes, report: ReportData, ks: Sequence[int], y: float, end: int) -> None:
    """What leaves a device: behind the last of a lane, before the first, or else below."""
    each = [report.collectives[k] for k in ks]
    sent = sum(c.turns * c.wire_bytes for c in each)
    first, last = min(c.at for c in each), max(max(c.until, c.at) for c in each) + end / 150
    words = size(sent) if len(each) == 1 else f"{size(sent)} in {len(each)}"
    behind, room = last < 0.9 * end, first > 0.1 * end
    x = last + end * 0.006 if behind else first - end * 0.006 if room else end
    axes.text(
        x, y if behind or room else y - 0.42, words, size=9, color=FAINT,
        va="center", ha="left" if behind else "right",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, zorder=2.5,
    )  # fmt: skip


def _hidden(axes: Axes, report: ReportData, seconds: Callable[[Collective], float] | None) -> None:
    """One bar: what matrix products hide, and what everything else waits for."""
    found, known = report.collectives, report.terms
    source = f"predicted from {known.source}" if known else "counted in wire bytes"
    if seconds:
        source, each = "as `seconds` predicts", [seconds(c) for c in found]
    else:
        each = [predicted(c, known) if known else c.wire_bytes for c in found]
    sent = [c.turns * one for c, one in zip(found, each, strict=True)]
    total, left = sum(sent), known and exposed(found, each, report.matmuls, known)
    if left is None:  # it is not known how long a product takes
        waits = [not (c.meanwhile and c.meanwhile.flops) for c in found]
        left = [one * w for one, w in zip(sent, waits, strict=True)]
        rule = (
            "A collective counts as hidden if a matrix product is scheduled between its start and "
            "its end"
        )
    else:
        rule = "A collective is hidden for as long as the matrix products between its start and end"
    beside = total - sum(left)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    if not total:
        axes.text(0, 0.5, "Nothing leaves a device.", size=12, color=FAINT, va="center")
        return
    share = beside / total
    amount = f"{total * 1e3:,.2f} ms" if seconds or known else size(round(total))
    axes.add_patch(Rectangle((0, 0.0), share, 0.62, color=COLOURS[0], linewidth=0))
    axes.add_patch(Rectangle((share, 0.0), 1 - share, 0.62, color=COLOURS[1], linewidth=0))
    axes.text(0, 0.8, f"behind matrix products  {share:.0%}", size=11, color=COLOURS[0],
              weight="bold", va="bottom")  # fmt: skip
    axes.text(1, 0.8, f"exposed  {1 - share:.0%}", size=11, color=COLOURS[1], weight="bold",
              ha="right", va="bottom")  # fmt: skip
    axes.text(
        0, -0.28,
        f"of {amount}, {source}.\n{rule}: "
        "the compiler's plan, not a measurement.",
        size=9.5, color=FAINT, va="top", linespacing=1.5,
    )  # fmt: skip


def _label(label: str) -> str:
    """In two lines where one would be too long."""
    if "\n" in label or len(label) <= 12:
        return label
    end = "packs " if "pack" in label else "-"
    return label.replace(end, f"{end.rstrip()}\n", 1)


def timeline(reports: Mapping[str, ReportData]) -> Figure:
    """A figure with a panel for each report, under its name, over one axis of time."""
    played = {name: play(report) for name, report in reports.items()}
    high = TOP + BOTTOM + PANEL * len(played)
    figure = page(f"One step on {next(iter(reports.values())).where}", high=high)
    legend(figure, 0.041, 1 - 0.85 / high, _LANES)
    end = max(each.seconds for each in played.values()) * 1e3
    for n, (name, each) in enumerate(played.items()):
        bottom = (BOTTOM + PANEL * (len(played) - 1 - n) + 0.25) / high
        axes = figure.add_axes((0.105, bottom, 0.86, (PANEL - 0.95) / high))
        _panel(axes, name, each, end, is_last=n == len(played) - 1)
    return figure


def _panel(axes: Axes, name: str, played: Timeline, end: float, *, is_last: bool) -> None:
    axes.set_xlim(0, end)
    axes.set_ylim(0, 2)
    _blocks(axes, played.products, (1.12, 0.76), BUSY)
    waits = [(s.asked, s.done) for s in played.sent if s.done > s.asked]
    _blocks(axes, waits, (1.12, 0.76), WAITS)
    for parity in (0, 1):
        carried = [(s.begins, s.ends) for n, s in enumerate(played.sent) if n % 2 == parity]
        _blocks(axes, carried, (0.12, 0.62), CARRIES[parity])
    for s in played.sent:
        axes.plot([s.start * 1e3] * 2, [0.74, 0.9], color=CARRIES[0], linewidth=0.9)
        axes.plot([s.done * 1e3] * 2, [0.9, 1.06], color=FAINT, linewidth=0.9)
    for y, words in ((1.5, "multiplies"), (0.43, "carries")):
        axes.text(-end * 0.008, y, words, size=10.5, color=FAINT, ha="right", va="center")
    axes.text(0, 2.16, name, size=12, weight="bold", color=INK, va="bottom")
    axes.text(end, 2.16, _waited(played), size=10.5, color=FAINT, va="bottom", ha="right")
    bare(axes, labelsize=9.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:g}")
    if is_last:
        axes.set_xlabel("milliseconds, as the cost model predicts", color=FAINT, size=10,
                        loc="right")  # fmt: skip


def _blocks(axes: Axes, spans: Sequence[Any], y: tuple[float, float], colour: str) -> None:
    wide = [(start * 1e3, (end - start) * 1e3) for start, end in spans]
    axes.broken_barh(wide, y, facecolor=colour, edgecolor="white", linewidth=0.35)


def _waited(played: Timeline) -> str:
    carried = sum(s.ends - s.begins for s in played.sent)
    return (
        f"{milliseconds(played.seconds)}: {milliseconds(played.waited)} of "
        f"{milliseconds(carried)} of communication waited for ({percent(played.waited, carried)})"
    )
