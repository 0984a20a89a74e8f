"""The table of a report: a line for each compiled collective; equal ones share a line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import PurePath

from jaxcoll._hlo.collective import Collective, Meanwhile
from jaxcoll._report.measured import Measured, Times, add_turns
from jaxcoll._report.rows import Row
from jaxcoll._show.table import Table
from jaxcoll._show.units import WIDTH, milliseconds, percent, pluralize, scale, shorten, size, some

MOST = 40
"""The most lines that the table shows; the rest are counted."""

Cell = Callable[[Row, int], str]
"""A function from a row, and the number of rows that share its line, to a column's text."""


def least(*collectives: Collective) -> str:
    """Make a sign for a figure that is a lower bound: one turn counts where none is known."""
    return "≥ " if any(c.trips is None for c in collectives) else ""


def _show_origin(row: Row, n: int) -> str:
    return str(len(row.requested)) + "?" * (row.matched_by == "order") if row.requested else "–"


COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("kind", "<", lambda row, n: f"{n} × " * (n > 1) + row.compiled.kind),
    ("from", ">", _show_origin),
    ("dtype", "<", lambda row, n: ",".join(row.compiled.dtypes)),
    ("bytes", ">", lambda row, n: size(row.compiled.nbytes)),
    ("runs", ">", lambda row, n: "?" if row.compiled.trips is None else f"{row.compiled.trips:,}"),
    ("wire bytes", ">", lambda row, n: least(row.compiled) + size(n * row.wire_bytes)),
    ("overlapped by", "<", lambda row, n: describe_overlap(row.compiled.meanwhile)),
    ("changes", "<", lambda row, n: ", ".join(row.changes) or "as requested" * bool(row.requested)),
)
"""The name, the alignment and the cells of each column."""

_SENT = ("kind", "dtype", "bytes", "runs", "wire bytes")


def _waiting(times: Times) -> str:
    ms = [f"{1e3 * seconds:.3g}" for seconds in times.waiting]
    if len(ms) > 4:
        ms = [f"{1e3 * min(times.waiting):.3g} to {1e3 * max(times.waiting):.3g}"]
    return f"{', '.join(ms)} ms"


def _last(times: Times | None) -> str:
    if times is None or (last := times.last) is None:
        return ""
    share, late = percent(last.share, 1), milliseconds(last.seconds)
    return f"last to arrive: rank {last.rank} in {share} of runs, by {late}"


MEASURED_COLUMNS: tuple[tuple[str, str, Callable[[Times], str]], ...] = (
    (
        "transfer",
        ">",
        lambda t: milliseconds(t.transfer) + f" for {len(t.rows)}" * (len(t.rows) > 1),
    ),
    ("busbw", ">", lambda times: f"{scale(round(times.busbw))}B/s"),
    ("waiting, by rank", ">", _waiting),
)
"""Columns of measured times, which replace those of the compiler's schedule."""


def table(rows: Sequence[Row], measured: Measured | None = None) -> Table:
    """Make the table; its first column is the position in `rows`."""
    rows = add_turns(rows, measured)
    compiled, timed, times = COLUMNS, MEASURED_COLUMNS[:0], measured.times if measured else ()
    if measured:
        compiled = tuple(column for column in COLUMNS if column[0] in _SENT)
        timed = MEASURED_COLUMNS if len(measured.ranks) > 1 else MEASURED_COLUMNS[:2]
    columns = [*compiled, *timed]

    def cells(k: int, n: int) -> list[str]:
        of_row = [cell(rows[k], n) for _, _, cell in compiled]
        return of_row + [cell(t) if (t := times[k]) else "–" for _, _, cell in timed]

    def below(k: int) -> str:
        of_row = times[k] if measured else None
        fold = of_row.rows if of_row else ()
        together = f"#{', #'.join(map(str, fold))} are parts of one reduction, measured together"
        is_split = len({tuple(cells(n, 1)) for n in fold}) > 1
        return "  ".join(
            filter(None, [_last(of_row), together * is_split, describe_carried(rows[k])])
        )

    # A model of many layers has many equal rows: they share a line, which says how many.
    equal: dict[tuple[str, ...], list[int]] = {}
    for k in range(len(rows)):
        equal.setdefault((*cells(k, 1), below(k)), []).append(k)
    lines = [(places[0], len(places)) for places in equal.values()]
    left = sum(n for _, n in lines[MOST:])
    return Table(
        ("#", *(name for name, _, _ in columns)),
        ">" + "".join(side for _, side, _ in columns),
        [(str(k), *cells(k, n)) for k, n in lines[:MOST]],
        [shorten(below(k), 2 * WIDTH) for k, _ in lines[:MOST]],
        f"… and {left} more, in `report.rows`" if left else "",
    )


def describe_carried(row: Row) -> str:
    """Name the lines of Python that requested a row, and the packs and leaves it carries."""
    packs = packs_in_words(row.packs)
    if row.leaves:
        packs += f" ({', '.join(leaf or 'the value' for leaf in some(row.leaves, 3))})"
    loop = f"in loop {row.compiled.loops[-1]}" if row.compiled.loops else ""
    return "  ".join(part for part in (", ".join(list_lines([row], 2)), packs, loop) if part)


def list_lines(rows: Iterable[Row], most: int) -> list[str]:
    """List the user's lines, with library lines in parentheses; "near": a neighbour's line."""
    lines = []
    for row in rows:
        near = "near " * row.compiled.is_near
        library = row.compiled.library
        behind = f" ({strip_folders(library)})" if library else ""
        lines += [f"{near}{strip_folders(line)}{behind}" for line in row.sources]
    return some([*dict.fromkeys(lines)], most)


def totals(collectives: Iterable[Collective]) -> str:
    """Count the collectives of each kind, and their bytes, for every loop iteration."""
    kinds: dict[str, list[Collective]] = {}
    for c in collectives:
        kinds.setdefault(c.kind, []).append(c)
    if not kinds:
        return "no collectives"
    parts = [
        f"{least(*cs)}{pluralize(sum(c.turns for c in cs), kind)}" for kind, cs in kinds.items()
    ]
    every = [c for cs in kinds.values() for c in cs]
    return f"{', '.join(parts)}, {least(*every)}{size(sum(c.turns * c.nbytes for c in every))}"


def packs_in_words(packs: Sequence[str]) -> str:
    """Write the numbers of packs as ranges, grouped by reduction.

    Examples:
      >>> packs_in_words([f"all_reduce_5f3a1c/pack{k}" for k in (1, 2, 3, 0, 7)])
      'packs 0-3, 7 of all_reduce_5f3a1c'
    """
    by_reduction: dict[tuple[str, str], list[int]] = {}
    for pack in packs:
        reduction, _, last = pack.partition("/")
        noun, number = re.findall(r"[a-z]+|\d+", last)
        by_reduction.setdefault((reduction, noun), []).append(int(number))
    phrases = []
    for (reduction, noun), numbers in by_reduction.items():
        many = noun + "s" * (noun == "pack" and len(numbers) > 1)
        phrases.append(f"{many} {_ranges(sorted(numbers))} of {reduction}")
    return ", ".join(phrases)


def describe_overlap(meanwhile: Meanwhile | None) -> str:
    """Describe the work between a collective's start and end, in a few words.

    Examples:
      >>> describe_overlap(Meanwhile(14, 2, 1_240_000_000)), describe_overlap(None)
      ('1.24 GFLOP, 14 ops', 'synchronous')
    """
    if meanwhile is None:
        return "synchronous"
    if not meanwhile.instructions:
        return "nothing"
    operations = pluralize(meanwhile.instructions, "op")
    return f"{scale(meanwhile.flops)}FLOP, {operations}" if meanwhile.matmuls else operations


def strip_folders(source: str) -> str:
    file, _, line = source.rpartition(":")
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    if cell := cell_of(file):  # ("Cell", "In[3]")
        return f"{' '.join(cell)}:{line}"
    return PurePath(source.replace("\\", "/")).name


def _ranges(numbers: Sequence[int]) -> str:
    # Consecutive numbers all differ from their positions by the same amount.
    grouped = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = ([n for _, n in run] for _, run in grouped)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
