"""The picture of a timeline: what multiplies, what travels behind it, and where all wait."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jaxcoll._observe.report_data import ReportData
from jaxcoll._observe.timeline import Timeline, timeline
from jaxcoll._show.style import COLOURS, FAINT, INK, bare, page
from jaxcoll._show.units import milliseconds, percent

MULTIPLIES, WAITS = "#3d4a5c", "#e2725b"
CARRIES = (COLOURS[0], "#6fb3c4")
HIGH = 2.45
TOP, BOTTOM = 0.95, 0.75
"""Inches: of each panel, and of what is above and below all."""


def draw(reports: Mapping[str, ReportData]) -> Figure:
    """A figure with a panel for each report, under its name, over one axis of time."""
    played = {name: timeline(report) for name, report in reports.items()}
    high = TOP + BOTTOM + HIGH * len(played)
    figure = page(high=high)
    first = next(iter(reports.values()))
    figure.text(0.04, 1 - 0.42 / high, f"One step on {first.where}", size=17, weight="bold",
                color=INK, va="center")  # fmt: skip
    _legend(figure, 1 - 0.80 / high)
    end = max(each.seconds for each in played.values()) * 1e3
    for n, (name, each) in enumerate(played.items()):
        bottom = (BOTTOM + HIGH * (len(played) - 1 - n) + 0.25) / high
        axes = figure.add_axes((0.105, bottom, 0.86, (HIGH - 0.95) / high))
        _panel(axes, name, each, end, is_last=n == len(played) - 1)
    return figure


def _panel(axes: Axes, name: str, played: Timeline, end: float, *, is_last: bool) -> None:
    axes.set_xlim(0, end)
    axes.set_ylim(0, 2)
    _blocks(axes, played.products, (1.12, 0.76), MULTIPLIES)
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
    axes.text(end, 2.16, _summary(played), size=10.5, color=FAINT, va="bottom", ha="right")
    bare(axes, labelsize=9.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if is_last:
        axes.set_xlabel("milliseconds, as the cost model predicts", color=FAINT, size=10,
                        loc="right")  # fmt: skip


def _blocks(
    axes: Axes, spans: list[tuple[float, float]] | tuple[tuple[float, float], ...],
    y: tuple[float, float], colour: str,
) -> None:  # fmt: skip
    wide = [(start * 1e3, (end - start) * 1e3) for start, end in spans]
    axes.broken_barh(wide, y, facecolor=colour, edgecolor="white", linewidth=0.35)


def _summary(played: Timeline) -> str:
    carried = sum(s.ends - s.begins for s in played.sent)
    return (
        f"{milliseconds(played.seconds)}: {milliseconds(played.waited)} of "
        f"{milliseconds(carried)} of communication waited for ({percent(played.waited, carried)})"
    )


def _legend(figure: Figure, y: float) -> None:
    x = 0.041
    for words, colour, width in (
        ("matrix products", MULTIPLIES, 0.125),
        ("a collective has the links", CARRIES[0], 0.18),
        ("everything waits for one", WAITS, 0.17),
        ("started", CARRIES[0], 0.07),
        ("its end", FAINT, 0.07),
    ):
        mark = "|" if words in ("started", "its end") else "■"
        figure.text(x, y, mark, size=11, color=colour, va="center")
        figure.text(x + 0.013, y, words, size=10, color=FAINT, va="center")
        x += width
