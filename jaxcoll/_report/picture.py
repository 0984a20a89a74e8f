"""Pictures of a report: the compiled schedule and its overlap, or a measured step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from jaxcoll._hlo.collective import Collective, Loop, Matmul
from jaxcoll._report.measured import Measured
from jaxcoll._report.row_table import least, packs_in_words
from jaxcoll._report.rows import Row
from jaxcoll._show.style import COLOURS, FAINT, INK, LINE, PALE, legend, page, strip_frame
from jaxcoll._show.units import milliseconds, percent, pluralize, scale, size

PRODUCTS, BUSY = "#b9c1cc", "#3d4a5c"
LEFT, RIGHT = 0.105, 0.965
MOST_LANES, MOST_RANKS = 14, 16
_LOOKS = (
    ("■", INK, "overlaps a matrix product", 0.165),
    ("■", "#a5a8ae", "asynchronous, overlaps none", 0.185),
    ("□", INK, "synchronous", 0.15),
)
"""The legend of collectives: a symbol, its colour, its meaning and its width."""
_MEASURED = {"computing": PRODUCTS, "transfer": COLOURS[0], "waiting": COLOURS[1]}


class Schedule(NamedTuple):
    """The values that a picture of the schedule shows; the fields are those of `Report`."""

    rows: Sequence[Row]
    matmuls: Sequence[Matmul]
    loops: Sequence[Loop]
    instructions: int
    seconds: float | None
    exposed_seconds: float | None
    predicted_from: str

    @property
    def collectives(self) -> list[Collective]:
        return [row.compiled for row in self.rows]


def draw_schedule(title: str, lines: Sequence[str], schedule: Schedule) -> Figure:
    """Draw a figure of 1,920 × 1,080 pixels, without pyplot; `lines` stand below its title."""
    figure = page(title, (" " if len("".join(lines)) < 140 else "\n").join(lines))
    legend(figure, LEFT, 0.811, _LOOKS)
    _draw_instructions(figure.add_axes((LEFT, 0.29, RIGHT - LEFT, 0.49)), schedule)
    _draw_hidden(figure.add_axes((LEFT, 0.085, RIGHT - LEFT, 0.075)), schedule)
    return figure


def _group_lanes(rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
    by_label: dict[str, list[int]] = {}
    several = len({row.compiled.kind for row in rows}) > 1
    for k, row in enumerate(rows):
        kind, packs = row.compiled.kind, packs_in_words(row.packs).partition(" of ")[0]
        label = (f"{kind}\n{packs}" if several else packs) if packs else kind
        by_label.setdefault(label, []).append(k)
    lanes = list(by_label.items())
    if len(lanes) > MOST_LANES:
        rest = [k for _, ks in lanes[MOST_LANES - 1 :] for k in ks]
        lanes = [*lanes[: MOST_LANES - 1], (f"{len(lanes) - MOST_LANES + 1} more", sorted(rest))]
    return lanes


def _draw_instructions(axes: Axes, schedule: Schedule) -> None:
    """Draw the instructions from left to right: matrix products below, collectives above."""
    lanes, end = _group_lanes(schedule.rows), max(schedule.instructions, 1)
    top = max(len(lanes) + 1.55, 4.5)
    axes.set_xlim(0, end)
    axes.set_ylim(0, top)
    for loop in schedule.loops:
        span = Rectangle((loop.at, 0), loop.until - loop.at, top, color=PALE, zorder=0)
        axes.add_patch(span)
        turns = "loop × ?" if loop.trips is None else f"loop × {loop.trips:,}"
        axes.text(loop.at + end * 0.004, top - 0.12, turns, size=9, color=FAINT, va="top")
    _draw_products(axes, schedule)
    beside = {"ha": "right", "va": "center", "size": 10}
    axes.text(-end * 0.008, 0.55, "matrix\nproducts", color=FAINT, **beside)
    for n, (label, ks) in enumerate(lanes):
        y, colour = top - 0.8 - n, COLOURS[n % len(COLOURS)]
        beside["size"] = 10 if len(lanes) < 11 else 9
        axes.axhline(y, color=LINE, linewidth=0.8, zorder=1)
        axes.text(-end * 0.008, y, _break_label(label), color=colour, weight="bold", **beside)
        for k in ks:
            _draw_span(axes, schedule.rows[k].compiled, y, colour, end)
        _write_sizes(axes, [schedule.rows[k] for k in ks], y, end)
    strip_frame(axes)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("instruction of the compiled schedule", color=FAINT, size=10, loc="right")


def _draw_products(axes: Axes, schedule: Schedule) -> None:
    """Draw a stroke for each product; its height is relative to the product with the most FLOP."""
    most = max((m.flops for m in schedule.matmuls), default=0)
    spans = [(c.at, c.until) for c in schedule.collectives if c.is_async]
    for m in schedule.matmuls:
        height = 0.12 + 0.88 * (m.flops / most if most else 0)
        overlaps = any(start < m.at < until for start, until in spans)
        colour = BUSY if overlaps else PRODUCTS
        axes.vlines(m.at + 0.5, 0.05, 0.05 + height, color=colour, linewidth=2.2, zorder=2)
    if schedule.matmuls:
        total = sum(m.turns * m.flops for m in schedule.matmuls)
        label = f"{scale(total)}FLOP in {pluralize(len(schedule.matmuls), 'matrix product')}"
        axes.annotate(
            label, (0, 0), (0, -23), xycoords="axes fraction", textcoords="offset points",
            color=FAINT, size=10, va="center",
        )  # fmt: skip


def _draw_span(axes: Axes, c: Collective, y: float, colour: str, end: int) -> None:
    """Draw a collective from start to end; a synchronous one is short and hollow."""
    tall = 0.26 + 0.34 * min(1.0, math.log10(max(c.wire_bytes, 1)) / 9)
    width, face, edge, alpha = end / 220, "white", colour, 1.0
    if c.is_async and c.until > c.at:
        width, face, edge = max(c.until - c.at, end / 300), colour, "white"
        alpha = 1.0 if c.meanwhile and c.meanwhile.flops else 0.45
    axes.add_patch(
        Rectangle((c.at, y - tall / 2), width, tall, facecolor=face, edgecolor=edge, alpha=alpha,
                  linewidth=1.4, zorder=3)
    )  # fmt: skip


def _write_sizes(axes: Axes, rows: Sequence[Row], y: float, end: int) -> None:
    """Write a lane's wire bytes after its last collective, before its first, or else below it."""
    lane = [row.compiled for row in rows]
    sum_sent = sum(row.wire_bytes for row in rows)
    first, last = min(c.at for c in lane), max(max(c.until, c.at) for c in lane) + end / 150
    label = f"{least(*lane)}{size(sum_sent)}" + (f" in {len(lane)}" if len(lane) > 1 else "")
    after, before = last < 0.9 * end, first > 0.1 * end
    x = last + end * 0.006 if after else first - end * 0.006 if before else end
    axes.text(
        x, y if after or before else y - 0.42, label, size=9, color=FAINT,
        va="center", ha="left" if after else "right",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, zorder=2.5,
    )  # fmt: skip


def _draw_hidden(axes: Axes, schedule: Schedule) -> None:
    """Draw one bar: the communication that matrix products hide, and the exposed rest."""
    total, exposed = schedule.seconds, schedule.exposed_seconds
    if total is not None and exposed is not None:
        mark = least(*schedule.collectives)
        amount = f"{mark}{total * 1e3:,.2f} ms, predicted from {schedule.predicted_from}"
        rule = "is hidden for as long as the matrix products between its start and end take"
    else:  # the time of a product is not known
        total = exposed = sum(row.wire_bytes for row in schedule.rows)
        for row in schedule.rows:
            if row.compiled.meanwhile and row.compiled.meanwhile.flops:
                exposed -= row.wire_bytes
        amount = f"{least(*schedule.collectives)}{size(total)}, counted in wire bytes"
        rule = "counts as hidden if a matrix product is scheduled between its start and its end"
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    if not total:
        axes.text(0, 0.5, "Nothing leaves a device.", size=12, color=FAINT, va="center")
        return
    share = (total - exposed) / total
    above = {"size": 11, "weight": "bold", "va": "bottom"}
    axes.add_patch(Rectangle((0, 0.0), share, 0.62, color=COLOURS[0], linewidth=0))
    axes.add_patch(Rectangle((share, 0.0), 1 - share, 0.62, color=COLOURS[1], linewidth=0))
    axes.text(0, 0.8, f"hidden by matrix products  {percent(share, 1)}", color=COLOURS[0], **above)
    axes.text(1, 0.8, f"exposed  {percent(exposed, total)}", color=COLOURS[1], ha="right", **above)
    caption = f"of {amount}.\nA collective {rule}: the compiler's plan, not a measurement."
    axes.text(0, -0.28, caption, size=9.5, color=FAINT, va="top", linespacing=1.5)


def _break_label(label: str) -> str:
    if "\n" in label or len(label) <= 12:
        return label
    end = "packs " if "pack" in label else "-"
    return label.replace(end, f"{end.rstrip()}\n", 1)


def draw_step(title: str, sends: str, measured: Measured) -> Figure:
    """Draw a typical step, with one lane for each rank; `sends` are the totals of a run."""
    lanes = list(zip(measured.ranks, measured.lanes, strict=True))
    late = [last.rank for last, _ in measured.late]
    if len(lanes) > MOST_RANKS:  # late ranks first, then the lowest numbers
        lanes.sort(key=lambda lane: lane[0] not in late)
        lanes = sorted(lanes[:MOST_RANKS])
    high = 3.2 + 0.42 * max(len(lanes), 3)
    exposed, step = measured.exposed_seconds, measured.step_seconds
    takes = f"{milliseconds(exposed)} of exposed communication in each run"
    if step is not None:
        share = percent(exposed, step)
        takes = f"A step takes {milliseconds(step)}, {share} of it exposed communication"
    names = [
        f"Rank {last.rank} is late in {percent(last.share, 1)} of runs, by "
        f"{milliseconds(last.seconds)}."
        for last, _ in measured.late[:3]
    ]
    figure = page(
        f"{title}, {pluralize(len(measured.ranks), 'rank')}",
        f"{sends}. {takes} (medians of {pluralize(measured.runs, 'run')}).\n"
        + (" ".join(names) or "No rank is late."),
        high=high,
    )
    legend(figure, LEFT, 1 - 1.5 / high, [("■", c, name, 0.1) for name, c in _MEASURED.items()])
    axes = figure.add_axes((LEFT, 0.75 / high, RIGHT - LEFT, 1 - 2.5 / high))
    for y, (_, lane) in enumerate(lanes):
        axes.axhline(y, color=LINE, linewidth=0.8, zorder=1)
        for name, colour in _MEASURED.items():
            spans = [(1e3 * a, 1e3 * (b - a)) for kind, a, b in lane if kind == name]
            tall = 0.36 if name == "computing" else 0.62
            axes.broken_barh(spans, (y - tall / 2, tall), facecolors=colour, linewidth=0, zorder=2)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(left=0)
    strip_frame(axes)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}" for rank, _ in lanes])
    for label, (rank, _) in zip(axes.get_yticklabels(), lanes, strict=True):
        label.set(color=COLOURS[1] if rank in late else INK)
    axes.set_xlabel("milliseconds of a typical step", color=FAINT, size=10, loc="right")
    return figure
