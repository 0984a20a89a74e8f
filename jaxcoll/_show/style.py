"""The style that all figures share: colours, page, heading, axes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, LINE, PALE = "#1d2433", "#717a8a", "#dfe3e9", "#f4f6f8"
COLOURS = (
    "#1f6f8b", "#e2725b", "#6a9f58", "#b07aa1", "#d9a441", "#4e79a7", "#c1587c", "#5b8f8c",
    "#8c6d46", "#7b6fb0",
)  # fmt: skip
"""The colours of lines and bars, in this order; the first two also mean good and bad."""

WIDE, HIGH = 12.8, 7.2
"""The size of a page in inches: 1,920 × 1,080 pixels."""

LEFT = 0.04
"""The left edge of the heading, as a fraction of the page's width."""


def page(title: str, below: str, *, high: float = HIGH) -> Figure:
    """Make a blank page with a title and a fainter text `below`; pyplot does not manage it."""
    figure = Figure(figsize=(WIDE, high), dpi=150, facecolor="white")
    figure.text(LEFT, 1 - 0.54 / high, title, size=21, weight="bold", color=INK)
    figure.text(LEFT, 1 - 0.71 / high, below, size=11, color=FAINT, va="top", linespacing=1.4)
    return figure


def legend(
    figure: Figure, x: float, y: float, entries: Iterable[tuple[str, str, str, float]]
) -> None:
    """Draw a legend in one line; each entry is (mark, colour, label, width)."""
    for mark, colour, label, width in entries:
        figure.text(x, y, mark, size=11, color=colour, va="center")
        figure.text(x + 0.013, y, label, size=10, color=FAINT, va="center")
        x += width


def strip_frame(axes: Axes) -> None:
    """Remove the frame and ticks of `axes`, except the line at the bottom and the labels."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=FAINT, length=0, labelsize=10, which="both")
