"""Predict the seconds of one all-reduce over 2 to 16,384 GPUs, with the cost model alone.

python -m benchmarks.simulation --tree resnet50 --chip h100 --plot simulation.png
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

import jaxcoll as jc
from benchmarks.all_reduce import parser_of
from jaxcoll._show.table import Table
from jaxcoll._show.units import milliseconds
from jaxcoll.cli import flags

ALGORITHMS = "native,native/native,ring,halving_doubling,shuffle"
RANKS = tuple(2**k for k in range(1, 15))
PER_HOST = 8

Lines = Mapping[str, Sequence[float]]
"""For each algorithm, seconds over the numbers of replicas in `RANKS`."""


def simulate(nbytes: int, chip: str, algorithms: Sequence[str]) -> tuple[Lines, str]:
    """Predict the all-reduce of one float32 array over 2, 4, 8, … 16,384 GPUs, eight per host.

    In "inner/outer", the inner algorithm runs within a host; on a single host it runs alone.

    Returns:
      The seconds, and the source of the prediction.

    Raises:
      ValueError: the algorithm or chip is unknown.
    """
    array, lines, source = jax.ShapeDtypeStruct((nbytes // 4,), "float32"), {}, ""
    for name in algorithms:
        lines[name] = []
        for n in RANKS:
            hosts = max(1, n // PER_HOST)
            two = "/" in name and hosts > 1
            plan = jc.plan(
                array,
                topology=f"{chip}:{hosts}x{n // hosts}",
                axis_size=(hosts, n // hosts) if two else n,
                axis_name=("host", "device") if two else "device",
                options=flags.parse_options(name if two else name.partition("/")[0]),
            )
            lines[name].append(plan.predicted.seconds)
            source = str(plan).partition(", from ")[2].partition("\n")[0]
    return lines, source


def text_of(lines: Lines) -> str:
    """Return a table of the seconds, with a star at the fastest in each row."""
    rows = []
    for n, seconds in zip(RANKS, zip(*lines.values(), strict=True), strict=True):
        marks = (" *" if s == min(seconds) else "  " for s in seconds)
        times = (milliseconds(s) + mark for s, mark in zip(seconds, marks, strict=True))
        rows.append([f"{n:,}", *times])
    columns = ("replicas", *(f"{name}  " for name in lines))
    return f"{Table(columns, '>' * len(columns), rows).text()}\n* fastest"


def draw(lines: Lines, title: str, source: str, path: Path) -> None:
    """Plot predicted time against the number of replicas, as a PNG of 1,920 × 1,080 pixels."""
    from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator

    from benchmarks.chart import curves
    from jaxcoll._show.style import COLOURS, FAINT, INK, LEFT, PALE, page

    below = "inner/outer: reduced within a host first, then between hosts." * ("/" in str(lines))
    figure = page(title, below)
    axes = figure.add_axes((0.075, 0.16, 0.715, 0.63))
    named = {
        f"{name}, {milliseconds(line[-1])}": list(zip(RANKS, line, strict=True))
        for name, line in lines.items()
    }
    axes.axvspan(RANKS[0] * 0.94, PER_HOST * 1.09, color=PALE, linewidth=0, zorder=0)
    where = {"transform": axes.get_xaxis_transform(), "ha": "right", "va": "top"}
    axes.text(PER_HOST * 0.98, 0.975, "one host", size=10.5, color=FAINT, **where)
    curves(axes, named, dict(zip(named, COLOURS * len(named), strict=False)))
    axes.xaxis.set_major_locator(FixedLocator(RANKS))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1,)))
    axes.yaxis.set_major_formatter(EngFormatter("s", places=0))
    axes.set_xlim(RANKS[0] * 0.94, RANKS[-1])
    axes.set_xlabel("devices", color=FAINT, size=10.5, loc="right")
    axes.set_title("Predicted time", loc="left", size=13, weight="bold", color=INK, pad=12)
    figure.text(LEFT, 0.035, f"Predicted, not measured, from {source}", size=9.5, color=FAINT)
    figure.savefig(path, format="png")


def main(argv: Sequence[str] | None = None) -> Lines:
    """Predict, print and write the seconds; returns them."""
    parser = parser_of(__doc__)
    flags.add_tree(parser, default="resnet50")
    add = parser.add_argument
    add("--chip", default="h100", metavar="NAME", help="GPU, as in a topology (default: h100)")
    add(
        "--algorithms",
        default=ALGORITHMS,
        metavar="LIST",
        help=f"to compare (default: {ALGORITHMS})",
    )
    add("--json", metavar="FILE", help="write the seconds to FILE; - for standard output")
    add("--plot", type=Path, metavar="FILE.png", help="plot the seconds")
    args = parser.parse_args(argv)
    leaves = flags.read_tree(args.tree, args.dtype).values()
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    lines, source = simulate(nbytes, args.chip, args.algorithms.split(","))
    title = f"One all-reduce of {nbytes / 1e6:,.1f} MB, from 2 to {RANKS[-1]:,} {args.chip.upper()}"
    flags.write_json(args.json, {"replicas": RANKS, "from": source, "seconds": lines})
    if args.plot:
        draw(lines, title, source, args.plot)
    if args.json != "-":
        print(f"{title}\n{text_of(lines)}. Predicted, not measured, from {source}")
    return lines


if __name__ == "__main__":
    main()
