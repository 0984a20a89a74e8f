"""The style that all figures share: colours, page, heading, axes. Needs matplotlib."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, LINE, PALE = "#1d2433", "#717a8a", "#dfe3e9", "#f4f6f8"
COLOURS = (
    "#1f6f8b", "#e2725b", "#6a9f58", "#b07aa1", "#d9a441", "#4e79a7", "#c1587c", "#5b8f8c",
    "#8c6d46", "#7b6fb0",
)  # fmt: skip
"""For lines and bars, in this order; the first two also mean good and bad."""

WIDE, HIGH = 12.8, 7.2
"""Inches of a page, which has 1,920 × 1,080 pixels."""


def page(title: str = "", below: str = "", *, high: float = HIGH) -> Figure:
    """An empty white page with a heading, and a fainter line or two `below`; apart from pyplot."""
    figure = Figure(figsize=(WIDE, high), dpi=150, facecolor="white")
    if title:
        figure.text(0.04, 0.925, title, size=21, weight="bold", color=INK)
    if below:
        figure.text(0.04, 0.902, below, size=11, color=FAINT, va="top", linespacing=1.4)
    return figure


def bare(axes: Axes, labelsize: float = 10.5) -> None:
    """Leaves of the frame only what carries data: the line at the bottom, and labels."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=FAINT, length=0, labelsize=labelsize, which="both")
