"""What the compiler did to one collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.report_data import ReportData


def changes(report: ReportData, k: int) -> Iterable[str]:
    """In words, what became of what `report.collectives[k]` carries out."""
    c, origin = report.collectives[k], report.origins[k]
    if report.requested is not None:
        asked = [report.requested[i] for i in origin.requested]
        if not asked:
            yield "added by the compiler" if not report.dropped else "origin unknown"
        if origin.again:
            yield "repeated"
        elif len(asked) > 1:
            yield f"merged {len(asked)}"
        if any(report.carriers[i] > 1 for i in origin.requested):
            yield "split"
        before = Counter(r.kind for r in asked)
        if asked and c.kind not in before:
            yield f"was {', '.join(before)}"
        yield from _dtype_change(asked, c)
        if asked and any(r.loops for r in asked) and not c.loops:
            yield "out of its loop"
    if c.is_async:
        yield "asynchronous"


def _dtype_change(asked: Sequence[Collective], c: Collective) -> Iterable[str]:
    """Types that fewer elements have than was requested, and those that more have."""
    before, after = _elements(asked), _elements([c])
    if before.total() == after.total() and before != after:
        fewer, more = sorted(before - after), sorted(after - before)
        yield f"{', '.join(fewer)} → {', '.join(more)}"
    elif asked and not set(after) <= set(before):
        yield f"{', '.join(sorted(before))} → {', '.join(sorted(after))}"


def _elements(collectives: Iterable[Collective]) -> Counter[str]:
    found: Counter[str] = Counter()
    for c in collectives:
        for operand in c.operands:
            found[operand.dtype] += operand.size
    return found
