"""The picture of what was measured: a typical step, with one lane for each rank."""

from __future__ import annotations

from matplotlib.figure import Figure

from jaxcoll._observe.measured import Measured
from jaxcoll._observe.report import Report
from jaxcoll._observe.row_table import totals
from jaxcoll._show.style import COLOURS, FAINT, INK, LINE, bare, legend, page
from jaxcoll._show.units import counted, milliseconds, percent

LOOKS = {"computing": "#b9c1cc", "transfer": COLOURS[0], "waiting": COLOURS[1]}
LEFT, RIGHT = 0.105, 0.965
MOST_RANKS = 16


def plot_lanes(report: Report, measured: Measured) -> Figure:
    """Draw a figure as wide as a page, and the higher the more ranks there are."""
    lanes = list(zip(measured.ranks, measured.lanes, strict=True))
    if len(lanes) > MOST_RANKS:  # those that are late, and then the first
        late = [last.rank for last, _ in measured.late]
        lanes.sort(key=lambda lane: lane[0] not in late)
        lanes = sorted(lanes[:MOST_RANKS])
    high = 3.2 + 0.42 * max(len(lanes), 3)
    devices = counted(report.devices, "device")
    title = f"{report.name} on {devices}, {counted(len(measured.ranks), 'rank')}"
    figure = page(title, _subtitle(report, measured), high=high)
    marks = [("■", colour, name, 0.1) for name, colour in LOOKS.items()]
    legend(figure, LEFT, 1 - 1.5 / high, marks)
    axes = figure.add_axes((LEFT, 0.75 / high, RIGHT - LEFT, 1 - 2.5 / high))
    for y, (_, lane) in enumerate(lanes):
        axes.axhline(y, color=LINE, linewidth=0.8, zorder=1)
        for name, colour in LOOKS.items():
            spans = [(1e3 * a, 1e3 * (b - a)) for kind, a, b in lane if kind == name]
            tall = 0.36 if name == "computing" else 0.62
            axes.broken_barh(spans, (y - tall / 2, tall), facecolors=colour, linewidth=0, zorder=2)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(left=0)
    bare(axes, labelsize=10)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}" for rank, _ in lanes])
    late = {last.rank for last, _ in measured.late}
    for label, (rank, _) in zip(axes.get_yticklabels(), lanes, strict=True):
        label.set(color=COLOURS[1] if rank in late else INK)
    axes.set_xlabel("milliseconds of a typical step", color=FAINT, size=10, loc="right")
    return figure


def _subtitle(report: Report, measured: Measured) -> str:
    exposed = percent(measured.exposed_seconds, measured.step_seconds)
    took = (
        f"{totals(report.collectives)}. A step takes {milliseconds(measured.step_seconds)}, "
        f"{exposed} of it exposed communication (medians of {counted(measured.runs, 'run')})."
    )
    names = [
        f"Rank {last.rank} comes late in {last.share:.0%} of runs, by {milliseconds(last.seconds)}."
        for last, _ in measured.late[:3]
    ]
    return f"{took}\n{' '.join(names) or 'No rank comes late.'}"
