"""The picture of the demo: its loss curves, beside what a device sends in each step."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

import jaxcoll as jc
from jaxcoll._show.style import COLOURS, FAINT, INK, LINE, bare, page
from jaxcoll._show.units import counted, size
from jaxcoll.demos.demonstration import Outcome, kinds_in_words

MANY, ONE = COLOURS[:2]
LEAVES = (MANY, "#5aa5bb", "#9bcbd8")
LEFT, MIDDLE, WIDTH = 0.06, 0.56, 0.385


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture as a PNG of 1,920 × 1,080 pixels."""
    title = "One device" if outcome.devices == 1 else f"{outcome.devices} devices"
    title += f" in {outcome.processes} processes" * (outcome.processes > 1)
    figure = page(
        f"{title}, one model",
        f"UCI handwritten digits, {counted(outcome.steps, 'step')} of {outcome.batch_size} images. "
        f"{outcome.test_accuracy:.1%} of the test images are read correctly; the parameters differ "
        f"from one device's by {_power(outcome.largest_relative_difference)}.",
    )
    for x, title in ((LEFT, "Loss, step by step"), (MIDDLE, "What a device reduces in each step")):
        figure.text(x, 0.775, title, size=13, weight="bold", color=INK)
    _losses(figure.add_axes((LEFT, 0.135, WIDTH, 0.56)), outcome)
    _packs(figure.add_axes((MIDDLE, 0.135, WIDTH, 0.60)), outcome)
    figure.text(MIDDLE, 0.06, _sent(outcome), size=11, color=FAINT, linespacing=1.5)
    figure.savefig(path, format="png")


def _losses(axes: Axes, outcome: Outcome) -> None:
    """Both curves, smoothed; they coincide, so the reference is a thin line inside the other."""
    steps = np.arange(1, outcome.steps + 1)
    many, one = map(np.array, (outcome.losses, outcome.losses_one_device))
    axes.semilogy(steps, many, color=LINE, linewidth=1)
    axes.semilogy(steps, _smooth(many), color=MANY, linewidth=6, solid_capstyle="round")
    axes.semilogy(steps, _smooth(one), color=ONE, linewidth=1.8)
    bare(axes)
    axes.grid(axis="y", which="major", color=LINE, linewidth=0.8, zorder=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, outcome.steps * 1.02)
    axes.set_xlabel("step", color=FAINT, size=11, loc="right")
    labels = (
        (0.0, MANY, f"{counted(outcome.devices, 'device')}, through jaxcoll"),
        (0.52, ONE, "1 device, without it"),
    )
    for x, color, label in labels:
        above = {"transform": axes.transAxes, "va": "bottom"}
        axes.text(x, 1.04, label, size=11.5, weight="bold", color=color, **above)


def _smooth(losses: np.ndarray) -> np.ndarray:
    """A running geometric mean over a twentieth of the steps, over fewer at the ends."""
    # Geometric, because the axis is logarithmic.
    window = np.ones(2 * (len(losses) // 40) + 1)
    total, count = (np.convolve(x, window, "same") for x in (np.log(losses), np.ones(len(losses))))
    return np.exp(total / count)


def _packs(axes: Axes, outcome: Outcome) -> None:
    """A bar for each array that is sent, as long as its bytes, with its leaves in shades."""
    plan = outcome.plan
    axes.set_axis_off()
    if not plan.packs:
        axes.text(0, 0.9, "Nothing: there is no other device.", size=12, color=FAINT)
        return
    longest = max(pack.nbytes for pack in plan.packs)
    for row, pack in enumerate(plan.packs):
        axes.text(-0.02, row, _carried(plan, pack), size=10, color=INK, ha="right", va="center")
        end = _bar(axes, row, plan, pack, longest)
        axes.text(end + 0.015, row, size(pack.nbytes), size=10, color=FAINT, va="center")
    axes.set_xlim(-0.34, 1.4)
    axes.set_ylim(max(len(plan.packs), 4) - 0.4, -0.6)
    if outcome.compiled.all_reduces == 1 < len(plan.packs):
        edge, top, bottom = 1.3, -0.31, len(plan.packs) - 0.69
        axes.plot([edge - 0.02, edge, edge, edge - 0.02], [top, top, bottom, bottom], color=ONE)
        looks = {"size": 11, "color": ONE, "weight": "bold", "va": "center"}
        words, middle = "compiled into\none all-reduce", (top + bottom) / 2
        axes.text(edge + 0.02, middle, words, rotation=270, multialignment="center", **looks)


def _bar(axes: Axes, row: int, plan: jc.Plan, pack: Any, longest: int) -> float:
    """Draw one pack; returns where it ends. Leaves with room for it carry their name."""
    end = 0.0
    for k, segment in enumerate(pack.segments):
        width = segment.size * pack.dtype.itemsize / longest
        color = LEAVES[k % len(LEAVES)]
        axes.barh(row, width, left=end, height=0.62, color=color)
        if len(pack.segments) > 1 and width > 0.2:
            name = _name(plan.leaves[segment.leaf].path)
            axes.text(end + width / 2, row, name, size=9, color="white", ha="center", va="center")
        end += width
    # A hair's breadth even for the smallest, or it would look as if nothing were sent.
    axes.barh(row, max(end, 0.004), height=0.62, color="none" if end > 0.004 else LEAVES[0])
    return max(end, 0.004)


def _sent(outcome: Outcome) -> str:
    if not outcome.plan.packs:
        return ""
    made = sum(outcome.compiled.kinds.values())
    text = (
        f"{kinds_in_words(outcome.requested)} requested, {made} compiled. "
        f"{outcome.wire_bytes_per_step:,} bytes leave each device: 2(n−1)/n of the "
        f"{outcome.plan.nbytes:,} that it adds, for n\u00a0=\u00a0{outcome.devices}."
    )
    return textwrap.fill(text, 62)


def _carried(plan: jc.Plan, pack: Any) -> str:
    """The first and the last leaf of a pack, as people would name them."""
    names = [_name(plan.leaves[s.leaf].path) for s in pack.segments]
    return names[0] if len(names) == 1 else f"{names[0]} …\n{names[-1]}"


def _name(path: str) -> str:
    """`.grads['conv1']['bias']` as conv1 bias; the reduced value is the loss."""
    return " ".join(re.findall(r"\['?([^'\]]+)'?\]", path)) or "loss"


def _power(value: float) -> str:
    """A number as a power of ten, for matplotlib."""
    if not value:
        return "nothing"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"${mantissa}\\cdot 10^{{{int(exponent)}}}$"
