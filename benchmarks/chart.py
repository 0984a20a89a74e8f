"""Charts of `all_reduce` and `simulation`: curves over sizes, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from benchmarks.all_reduce import world_of
from jaxcoll._show.style import COLOURS, FAINT, INK, LINE, WIDE, page, strip_frame
from jaxcoll._show.style import LEFT as MARGIN
from jaxcoll._show.units import milliseconds
from jaxcoll.cli.bench import AGAIN, BASELINE, Estimate, spell_size

TWIN = BASELINE + AGAIN
Line = Mapping[str, Any]
FASTER, SLOWER, OTHERS = COLOURS[0], COLOURS[1], "#8a94a6"
LEFT, RIGHT = 2.6, 2.5
HEAD, FOOT, GAP, ROW, CURVES = 1.45, 0.55, 1.15, 0.42, 5.0
"""Inches."""


def draw(results: Sequence[Line], path: Path) -> None:
    """Write the chart of a benchmark as a PNG, 1,920 pixels wide and as high as needed."""
    sizes = [r for r in results if r["is_size"]]
    of_trees = (r for r in results if not r["is_size"])
    trees = [list(g) for _, g in groupby(of_trees, itemgetter("workload"))]
    heights = [CURVES] * bool(sizes) + [ROW * (len(rows) - 1) for rows in trees]
    height = HEAD + FOOT + sum(heights) + GAP * (len(heights) - 1) + 0.35
    figure = _page(results, height)
    top = height - HEAD
    for k, inches in enumerate(heights):
        left = 1.0 if sizes and k == 0 else LEFT
        box = (left / WIDE, (top - inches) / height, (WIDE - left - RIGHT) / WIDE)
        axes = figure.add_axes((*box, inches / height))
        if sizes and k == 0:
            _bandwidths(axes, sizes)
        else:
            _bars(axes, trees[k - bool(sizes)], trees)
        top -= inches + GAP
    figure.savefig(path, format="png")


def _page(results: Sequence[Line], height: float) -> Figure:
    """Return an empty page with a title that describes the benchmark and its method."""
    first = results[0]
    libraries = dict.fromkeys(r["library"] for r in results)
    below = f"{first['reduce_op']} · {', '.join(libraries)}"
    figure = page(f"All-reduce over {world_of(first)}", below, high=height)
    figure.text(
        *(MARGIN, 0.2 / height),
        f"Medians of {first['rounds']} rounds, taken in turn; thin lines and bands: 95 % bootstrap "
        "intervals; grey band: the same program measured twice (A/A)."
        + " Grey bars: other libraries."
        * (len(libraries) > 1),
        size=9.5,
        color=FAINT,
    )
    return figure


def _bandwidths(axes: Axes, results: Sequence[Line]) -> None:
    ways = list(dict.fromkeys(r["algorithm"] for r in results if r["algorithm"] != TWIN))
    colours = dict(zip([way for way in ways if way != BASELINE], COLOURS * len(ways), strict=False))
    axes.fill_between(*_band(results, TWIN), color=LINE, linewidth=0, zorder=1)
    for way, colour in colours.items():
        axes.fill_between(*_band(results, way), color=colour, alpha=0.10, linewidth=0, zorder=2)
    lines = {w: [(r["bytes"], r["busbw"]) for r in results if r["algorithm"] == w] for w in ways}
    curves(axes, lines, colours)
    sizes = sorted({r["bytes"] for r in results})
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: math.ceil(len(sizes) / 12)]))
    axes.xaxis.set_major_formatter(lambda x, _: spell_size(round(x)))
    _plain_ticks(axes, "y")
    axes.set_xlabel("bytes on each replica", color=FAINT, size=10.5, loc="right")
    axes.set_title("Bus bandwidth, GB/s", loc="left", size=13, weight="bold", color=INK, pad=14)


def _band(results: Sequence[Line], way: str) -> tuple[list[int], list[float], list[float]]:
    """Return the sizes, and the limits of the median bus bandwidth's interval."""
    points = [r for r in results if r["algorithm"] == way]
    work = [(r["bytes"], r["busbw"] * r["seconds"]["median"], r["seconds"]) for r in points]
    return (
        [size for size, _, _ in work],
        [sent / seconds["high"] for _, sent, seconds in work],
        [sent / seconds["low"] for _, sent, seconds in work],
    )


def curves(
    axes: Axes, lines: Mapping[str, Sequence[tuple[int, float]]], colours: Mapping[str, str]
) -> None:
    """Draw lines over powers of two; a line without a colour is dashed and faint."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, line in lines.items():
        x, y = zip(*line, strict=True)
        style = "-" if name in colours else "--"
        colour = colours.get(name, FAINT)
        axes.plot(
            *(x, y, style), color=colour, linewidth=2.2, marker="o", markersize=4, zorder=3,
            clip_on=False, label=name,
        )  # fmt: skip
    strip_frame(axes)
    axes.grid(axis="y", which="major", color=LINE, linewidth=0.8, zorder=0)
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=10)


def _bars(axes: Axes, rows: Sequence[Line], trees: Sequence[Sequence[Line]]) -> None:
    """Draw ratios to the baseline's time: bars left of 1 are faster, right of 1 slower."""
    shown = [r for r in rows if r["algorithm"] not in (BASELINE, TWIN)]
    base, twin = (next(r for r in rows if r["algorithm"] == n) for n in (BASELINE, TWIN))
    axes.set_xscale("log")
    axes.axvspan(twin["ratio"]["low"], twin["ratio"]["high"], color=LINE, linewidth=0, zorder=0)
    axes.axvline(1, color=FAINT, linewidth=1.2, zorder=3)
    for k, row in enumerate(shown):
        ratio = Estimate(**row["ratio"])
        ours = row["library"] == base["library"]
        color = OTHERS if not ours else FASTER if ratio.median < 1 else SLOWER
        axes.barh(k, ratio.median - 1, left=1, height=0.56, color=color, zorder=2)
        axes.plot([ratio.low, ratio.high], [k, k], color=INK, linewidth=1.3, zorder=4)
        end = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right"}
        times = f"× {_short(ratio.median)}"
        axes.text(1.13, k, times, size=11.5, weight="bold", color=color, **end)
        axes.text(1.26, k, milliseconds(row["seconds"]["median"]), size=10.5, color=FAINT, **end)
    strip_frame(axes)
    axes.set_yticks(range(len(shown)), [r["algorithm"] for r in shown])
    axes.tick_params(axis="y", labelsize=11.5, labelcolor=INK)
    axes.set_ylim(max(len(shown), 1) - 0.45, -0.55)
    ratios = [r["ratio"] for tree in trees for r in tree]
    low, high = min(r["low"] for r in ratios) / 1.15, max(r["high"] for r in ratios) * 1.15
    axes.set_xlim(min(low, 0.8), max(high, 1.25))
    axes.grid(axis="x", which="major", color=LINE, linewidth=0.8, zorder=0)
    _plain_ticks(axes, "x")
    axes.set_title(
        f"{base['workload']}: {base['leaves']:,} arrays, {base['bytes'] / 1e6:,.1f} MB",
        loc="left", size=13, weight="bold", color=INK, pad=12, x=-(LEFT - MARGIN * WIDE) / 7.7,
    )  # fmt: skip
    axes.set_title(
        f"time ÷ that of a psum per leaf ({milliseconds(base['seconds']['median'])})",
        loc="right", size=10.5, color=FAINT, pad=12,
    )  # fmt: skip


def _plain_ticks(axes: Axes, which: str) -> None:
    """Label plain numbers: 1, 2 and 5 of each decade if there are few decades, else 1."""
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    axis = axes.xaxis if which == "x" else axes.yaxis
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def _short(value: float) -> str:
    """Format with two digits below 1, three above."""
    return f"{value:#.{2 if value < 0.995 else 3}g}".rstrip(".")
