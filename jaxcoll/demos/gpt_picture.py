"""The picture of `jaxcoll demo gpt`: one loss curve, and what each way to it sends and keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxcoll._observe.report_text import size
from jaxcoll.demos.demonstration import counted
from jaxcoll.demos.gpt_demo import Outcome
from jaxcoll.demos.gpt_training import MODES
from jaxcoll.demos.picture import FAINT, INK, LEAVES, LINE, MANY, ONE, bare, power, smooth

LEFT, MIDDLE = 0.06, 0.545


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture as a PNG of 1,920 × 1,080 pixels.

    Args:
      outcome: what to show.
      path: where to.
    """
    figure = Figure(figsize=(12.8, 7.2), dpi=150, facecolor="white")
    ways = counted(len(outcome.modes), "way")
    figure.text(LEFT, 0.915, f"{ways} to train, one model", size=22, weight="bold", color=INK)
    worst = max(map(outcome.difference, outcome.modes), default=0.0)
    figure.text(
        LEFT,
        0.863,
        f"A GPT of {outcome.parameters:,} parameters on the source of Python's standard library, "
        f"{counted(outcome.steps, 'step')} over {counted(outcome.devices, 'device')}. No loss "
        f"differs from one device's by more than {power(worst)}.",
        size=11,
        color=FAINT,
    )
    figure.text(LEFT, 0.775, "Loss, step by step", size=13, weight="bold", color=INK)
    _losses(figure.add_axes((LEFT, 0.135, 0.34, 0.56)), outcome)
    columns: tuple[tuple[str, Callable[[str], int]], ...] = (
        ("A step sends", lambda name: _wire_bytes(outcome, name)),
        ("The optimizer keeps", lambda name: outcome.modes[name].state_bytes),
    )
    for k, (title, value) in enumerate(columns):
        x = MIDDLE + 0.235 * k
        figure.text(x, 0.775, title, size=13, weight="bold", color=INK)
        axes = figure.add_axes((x, 0.135, 0.14, 0.60))
        _bars(axes, outcome, value, named=k == 0)
    figure.savefig(path, format="png")


def _losses(axes: Axes, outcome: Outcome) -> None:
    """All curves, smoothed. They coincide: one device's is a thin line inside all others."""
    steps = np.arange(1, outcome.steps + 1)
    for trained in outcome.modes.values():
        line = smooth(np.array(trained.losses))
        axes.plot(steps, line, color=MANY, linewidth=6, alpha=0.25, solid_capstyle="round")
    axes.plot(steps, smooth(np.array(outcome.reference.losses)), color=ONE, linewidth=1.8)
    bare(axes)
    axes.grid(axis="y", color=LINE, linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, outcome.steps * 1.02)
    axes.set_xlabel("step", color=FAINT, size=11, loc="right")
    labels = (
        (0.0, MANY, f"every way, {counted(outcome.devices, 'device')}"),
        (0.5, ONE, "1 device"),
    )
    for x, color, label in labels:
        axes.text(
            *(x, 1.04, label), size=11.5, weight="bold", color=color, transform=axes.transAxes
        )


def _bars(axes: Axes, outcome: Outcome, value: Callable[[str], int], *, named: bool) -> None:
    """A bar for each mode, with its number behind it, and its name before it if `named`."""
    axes.set_axis_off()
    longest = max(map(value, outcome.modes), default=0) or 1
    for row, name in enumerate(outcome.modes):
        axes.barh(row, max(value(name) / longest, 0.004), height=0.5, color=LEAVES[0])
        axes.text(1.05, row, size(value(name)), size=10.5, color=FAINT, va="center", ha="left")
        if named:
            axes.text(
                *(-0.06, row, name), size=11.5, weight="bold", color=INK, ha="right", va="center"
            )
            axes.text(
                *(0.0, row + 0.44, MODES[name].says), size=9, color=FAINT, va="center", ha="left"
            )
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(outcome.modes), 4) - 0.4, -0.6)


def _wire_bytes(outcome: Outcome, name: str) -> int:
    report = outcome.modes[name].report
    assert report is not None, "what runs on several devices was inspected"
    return report.wire_bytes
