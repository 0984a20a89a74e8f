"""The tables that `jaxcoll bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from jaxcoll.bench.naming import BASELINE, TWIN, significant
from jaxcoll.bench.terminal import new_console, new_table
from jaxcoll.bench.timing import Estimate, Result

WIDTH = 118
_COLUMNS = (
    "ms", f"÷ {BASELINE} [95 %]", "busbw", "CPU ms", "÷", "sent B", "kernel", "arrays", "temp B",
    "error",
)  # fmt: skip
_OF_TREES = ("build s", "÷")
LEGEND = """\
ms: one call, the slowest rank's · busbw: GB/s as in nccl-tests · CPU: all ranks · sent: from each
device, as compiled · kernel: the same by the loopback counter, ~ with other traffic in it; between
hosts only what leaves them · arrays: handed to collectives · temp: beside arguments and results ·
build: trace and compile · error: over the sum of magnitudes"""


def wide_console(*, to_stderr: bool) -> Console:
    """A console of `WIDTH` columns at least."""
    console = new_console(stderr=to_stderr, highlight=False)
    if console.width >= WIDTH:
        return console
    # A log, or a narrow window: lines that wrap are better than cells that are cut.
    return new_console(stderr=to_stderr, highlight=False, width=WIDTH)


def show(results: Sequence[Result], *, to_stderr: bool) -> None:
    """Print a table for each tree, and one for all sizes."""
    console = wide_console(to_stderr=to_stderr)
    for (is_size, _), found in groupby(
        results, lambda r: (r.is_size, not r.is_size and r.workload)
    ):
        rows = list(found)
        columns = [*["size"] * is_size, "algorithm", *_COLUMNS, *_OF_TREES * (not is_size)]
        align = ">" * is_size + "<" + ">" * (len(columns) - 1 - is_size)
        table = new_table(columns, align, _title(rows), no_wrap=True)
        table.padding, table.pad_edge = (0, 0), False
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


def _title(rows: Sequence[Result]) -> str:
    """What was reduced, and where: the workload, the world."""
    first = rows[0]
    what = "one array" if first.is_size else f"{first.workload}, {first.bytes / 1e6:,.1f} MB"
    if not first.is_size:
        what += f" in {first.leaves:,} {'array' if first.leaves == 1 else 'arrays'}"
    return f"{what} of {', '.join(first.dtypes)}: {first.reduce_op} over {first.world}"


def _cells(row: Result) -> list[str]:
    """The figures of a row, in the order of `_COLUMNS`."""
    disturbed = "~" if row.socket_bytes_disturbed else ""
    return [
        significant(row.seconds.median * 1e3),
        "1" if row.algorithm == BASELINE else str(row.ratio or "–"),
        significant(row.busbw),
        significant(row.cpu_seconds * 1e3),
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
    """Bytes with three digits and a decimal prefix: "43.7k"."""
    if nbytes is None:
        return "–"
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if nbytes >= size:
            return significant(nbytes / size) + prefix
    return f"{nbytes:.0f}"
