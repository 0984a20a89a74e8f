"""The picture of a simulation: predicted time against the size of the world."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from jaxcoll.bench.chart import BAND, COLORS, FAINT, INK, LINE, bare, label_ends
from jaxcoll.bench.naming import duration
from jaxcoll.cli.simulation import RANKS, Simulation

LEFT, RIGHT = 0.075, 0.79


def draw(simulation: Simulation, path: Path) -> None:
    """Write the picture as a PNG of 1,920 × 1,080 pixels.

    Args:
      simulation: what to show.
      path: where to.
    """
    figure = Figure(figsize=(12.8, 7.2), dpi=150, facecolor="white")
    size = f"{simulation.nbytes / 1e6:,.1f} MB"
    title = f"One all-reduce of {size}, from 2 to {RANKS[-1]:,} devices"
    figure.text(0.04, 0.925, title, size=21, weight="bold", color=INK)
    said = f"{simulation.what} on {simulation.where}."
    if any("/" in name for name in simulation.lines):
        said += f" inner/outer: reduced within a {_island(simulation)} first, then between them."
    figure.text(0.04, 0.877, said, size=11.5, color=FAINT)
    axes = figure.add_axes((LEFT, 0.16, RIGHT - LEFT, 0.63))
    _lines(axes, simulation)
    figure.text(
        0.04, 0.035, f"Predicted, not measured, from {simulation.terms.source}.", size=9.5,
        color=FAINT,
    )  # fmt: skip
    figure.savefig(path, format="png")


def _island(simulation: Simulation) -> str:
    return "slice" if simulation.terms.within.torus else "host"


def _lines(axes: Axes, simulation: Simulation) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(RANKS[0] * 0.94, RANKS[-1])
    ends = []
    for k, (name, line) in enumerate(simulation.lines.items()):
        color = COLORS[k % len(COLORS)]
        seconds = [cost.seconds for _, cost in line]
        # What coincides with an earlier line is still seen beside it.
        style = "-" if k != 1 else (0, (5, 2))
        ranks = [n for n, _ in line]
        axes.plot(ranks, seconds, linestyle=style, color=color, linewidth=2.6, zorder=3)
        axes.plot(ranks, seconds, "o", color=color, markersize=4.5, zorder=3, clip_on=False)
        ends.append((seconds[-1], f"{name}, {duration(seconds[-1])}", color))
    low, high = axes.get_ylim()
    axes.set_ylim(low * 0.8, high * 1.25)
    if 2 < simulation.island < RANKS[-1]:
        axes.axvspan(RANKS[0] * 0.94, simulation.island * 1.09, color=BAND, linewidth=0, zorder=0)
        axes.text(
            *(simulation.island * 0.98, 0.975, f"one {_island(simulation)}"),
            transform=axes.get_xaxis_transform(), ha="right", va="top", size=10.5, color=FAINT,
        )  # fmt: skip
    bare(axes)
    axes.grid(axis="y", which="major", color=LINE, linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(FixedLocator(RANKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _tick(y)))
    axes.minorticks_off()
    axes.set_xlabel("devices", color=FAINT, size=10.5, loc="right")
    axes.set_title("Predicted time", loc="left", size=13, weight="bold", color=INK, pad=12)
    label_ends(axes, ends)


def _tick(seconds: float) -> str:
    """A power of ten in the unit that suits it.

    Examples:
      >>> _tick(1e-5), _tick(0.01), _tick(10.0)
      ('10 µs', '10 ms', '10 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.999:
            return f"{seconds / size:g} {unit}"
    return f"{seconds * 1e6:g} µs"
