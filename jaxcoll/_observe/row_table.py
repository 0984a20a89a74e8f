"""The table of a report: a line for each compiled collective, those that are alike together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import PurePath

from jaxcoll._observe.parse.collective import Collective, Meanwhile
from jaxcoll._observe.rows import Row
from jaxcoll._show.table import Table
from jaxcoll._show.units import WIDTH, counted, scaled, shortened, size, some

MOST = 40
"""Lines of the table; the rest are counted."""

Cell = Callable[[Row, int], str]
"""The text of a column for rows that are alike in all that is shown: one of them, and how many."""


def _kind(row: Row, n: int) -> str:
    return row.compiled.kind if n == 1 else f"{n} × {row.compiled.kind}"


def _from(row: Row, n: int) -> str:
    return str(len(row.requested)) + "?" * (row.matched_by == "order") if row.requested else "–"


def _runs(row: Row, n: int) -> str:
    return "?" if row.compiled.trips is None else f"{row.compiled.trips:,}"


def _became(row: Row, n: int) -> str:
    return ", ".join(row.changes) or ("as requested" if row.requested else "")


COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("kind", "<", _kind),
    ("from", ">", _from),
    ("dtype", "<", lambda row, n: ",".join(row.compiled.dtypes)),
    ("bytes", ">", lambda row, n: size(row.compiled.nbytes)),
    ("runs", ">", _runs),
    ("wire bytes", ">", lambda row, n: size(n * row.wire_bytes)),
    ("meanwhile", "<", lambda row, n: during(row.compiled.meanwhile)),
    ("what became", "<", _became),
)
"""The name of each column, the side on which it is aligned, and its cells."""


def table(rows: Sequence[Row]) -> Table:
    """Return the table, whose first column is the position in `rows`."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for k, row in enumerate(rows):
        shown = (*(cell(row, 1) for _, _, cell in COLUMNS), carried(row))
        alike.setdefault(shown, []).append(k)
    lines = [(places[0], len(places)) for places in alike.values()]
    left = sum(n for _, n in lines[MOST:])
    return Table(
        ("#", *(name for name, _, _ in COLUMNS)),
        ">" + "".join(side for _, side, _ in COLUMNS),
        [(str(k), *(cell(rows[k], n) for _, _, cell in COLUMNS)) for k, n in lines[:MOST]],
        [shortened(carried(rows[k]), 2 * WIDTH) for k, _ in lines[:MOST]],
        f"… and {left} more, in `report.rows`" if left else "",
    )


def carried(row: Row) -> str:
    """Return the lines that asked for it, and the packs and leaves that it carries."""
    packs = packs_in_words(row.packs)
    if row.leaves:
        packs += f" ({', '.join(leaf or 'the value' for leaf in some(row.leaves, 3))})"
    loop = f"in loop {row.compiled.loops[-1]}" if row.compiled.loops else ""
    lines = ", ".join(some([without_folders(line) for line in row.sources], 2))
    if lines and row.compiled.library:
        lines += f" ({without_folders(row.compiled.library)})"
    lines = f"near {lines}" if row.compiled.is_near else lines
    return "  ".join(part for part in (lines, packs, loop) if part)


def totals(collectives: Iterable[Collective]) -> str:
    """Return how many of which kind, and their bytes, each turn of a loop counted."""
    kinds: Counter[str] = Counter()
    nbytes = 0
    for c in collectives:
        kinds[c.kind] += c.turns
        nbytes += c.turns * c.nbytes
    if not kinds:
        return "no collectives"
    return f"{', '.join(counted(n, kind) for kind, n in kinds.items())}, {size(nbytes)}"


def packs_in_words(packs: Sequence[str]) -> str:
    """Return packs by their numbers, reduction by reduction.

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


def during(meanwhile: Meanwhile | None) -> str:
    """Return what runs between start and end, in a few words.

    Examples:
      >>> during(Meanwhile(14, 2, 1_240_000_000)), during(None)
      ('1.24 GFLOP, 14 ops', 'waits')
    """
    if meanwhile is None:
        return "waits"
    if not meanwhile.instructions:
        return "nothing"
    operations = counted(meanwhile.instructions, "op")
    return f"{scaled(meanwhile.flops)}FLOP, {operations}" if meanwhile.matmuls else operations


def without_folders(source: str) -> str:
    """Return file:line alone."""
    return PurePath(source.replace("\\", "/")).name


def _ranges(numbers: Sequence[int]) -> str:
    """Return consecutive numbers as first-last."""
    # In a run a number and its place grow alike.
    grouped = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = ([n for _, n in run] for _, run in grouped)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
