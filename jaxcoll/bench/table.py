"""The benchmark in the terminal: what is being done, and a table of what came out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxcoll.bench.naming import BASELINE, TWIN
from jaxcoll.bench.results import Result
from jaxcoll.bench.terminal import new_console
from jaxcoll.bench.timing import Estimate

WIDTH = 118
_COLUMNS = (
    "ms", f"÷ {BASELINE} [95 %]", "busbw", "CPU ms", "÷", "sent B", "kernel", "arrays", "temp B",
    "error",
)  # fmt: skip
_OF_TREES = ("build s", "÷")
LEGEND = """\
ms: one call, the slowest rank's · busbw: GB/s as in nccl-tests · CPU: all ranks · sent: from each
device, as compiled · kernel: the same by the loopback counter, ~ with other traffic in it · arrays:
handed to collectives · temp: beside arguments and results · build: trace and compile · error: over
the sum of magnitudes"""


@contextlib.contextmanager
def progress_bar(steps: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, where that is a terminal.

    Args:
      steps: how often progress will be reported.
      shown: whether there is to be one at all.

    Yields:
      What to call with words for what is being done.
    """
    console = new_console(stderr=True)
    columns = (
        BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as progress:
        task = progress.add_task("", total=steps)
        yield lambda words: progress.update(task, description=words, advance=1)


def wide_console(*, to_stderr: bool) -> Console:
    """A console of `WIDTH` columns at least."""
    console = new_console(stderr=to_stderr, highlight=False)
    if console.width >= WIDTH:
        return console
    # A log, or a narrow window: lines that wrap are better than cells that are cut.
    return new_console(stderr=to_stderr, highlight=False, width=WIDTH)


def show(results: Sequence[Result], *, to_stderr: bool) -> None:
    """Print a table for each tree, and one for all sizes.

    Args:
      results: in the order in which they were measured.
      to_stderr: where standard output carries the lines.
    """
    console = wide_console(to_stderr=to_stderr)
    for (is_size, _), found in groupby(
        results, lambda r: (r.is_size, not r.is_size and r.workload)
    ):
        rows = list(found)
        table = _table(title(rows), by_size=is_size)
        for workload, group in groupby(rows, lambda r: r.workload):
            for k, row in enumerate(group):
                cells = [Text(cell) for cell in _cells(row)]
                cells += [Text(cell) for cell in _built(row)] * (not is_size)
                name = Text(row.algorithm, "dim" if row.algorithm in (BASELINE, TWIN) else "bold")
                table.add_row(*[workload if k == 0 else ""] * is_size, name, *cells)
            table.add_section()
        console.print(table)
    console.print(Text(LEGEND, "dim"))
    busy = [r.other_cores for r in results if r.other_cores is not None]
    if busy and max(busy) > 0.3:
        console.print(
            f"[yellow]Other programs kept up to {max(busy):.1f} cores busy meanwhile: trust "
            "ratios whose interval clears the A/A twin's, and no single time.[/]"
        )


def title(rows: Sequence[Result]) -> str:
    """What was reduced, where: the workload, the world, the machine."""
    first = rows[0]
    what = "one array" if first.is_size else f"{first.workload}, {first.bytes / 1e6:,.1f} MB"
    if not first.is_size:
        what += f" in {first.leaves:,} {'array' if first.leaves == 1 else 'arrays'}"
    return f"{what} of {', '.join(first.dtypes)}: {first.reduce_op} over {world_of(first)}"


def world_of(result: Result) -> str:
    """The replicas in words: "4 processes", "8 gpu devices", "2 processes × 4 cpu devices"."""
    n, processes = result.devices, result.processes
    if processes == 1:
        return f"{n} {result.platform} device{'s' * (n > 1)} of one process"
    if processes == n:
        return f"{n} processes"
    return f"{processes} processes × {n // processes} {result.platform} devices"


def _table(heading: str, *, by_size: bool) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 0), False
    if by_size:
        table.add_column("size", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    for column in (*_COLUMNS, *_OF_TREES * (not by_size)):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(row: Result) -> list[str]:
    """The figures of a row, in the order of `_COLUMNS`."""
    disturbed = "~" if row.socket_bytes_disturbed else ""
    return [
        _significant(row.seconds.median * 1e3),
        "1" if row.algorithm == BASELINE else str(row.ratio or "–"),
        _significant(row.busbw),
        _significant(row.cpu_seconds * 1e3),
        _median(row.cpu_ratio),
        _bytes(row.wire_bytes),
        disturbed + _bytes(row.socket_bytes),
        "–" if row.operands is None else f"{row.operands:,}",
        _bytes(row.temporary_bytes),
        f"{row.error:.0e}",
    ]


def _built(row: Result) -> list[str]:
    """What building costs; of no interest for one array."""
    seconds = "–" if row.compile_seconds is None else f"{row.compile_seconds:.2f}"
    return [seconds, _median(row.compile_ratio)]


def _median(ratio: Estimate | None) -> str:
    return "–" if ratio is None else f"{ratio.median:.2f}"


def _bytes(nbytes: float | None) -> str:
    """Bytes with three digits and a decimal prefix.

    Examples:
      >>> _bytes(None), _bytes(0), _bytes(704), _bytes(43_690), _bytes(153_342_192)
      ('–', '0', '704', '43.7k', '153M')
    """
    if nbytes is None:
        return "–"
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if nbytes >= size:
            return _significant(nbytes / size) + prefix
    return f"{nbytes:.0f}"


def _significant(value: float) -> str:
    """Three digits, or all those before the point.

    Examples:
      >>> _significant(1234.5), _significant(12.34), _significant(0.01234), _significant(0.0)
      ('1,234', '12.3', '0.0123', '0')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"
