"""Rows of a report: each compiled collective, matched to the requested ones it carries out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxcoll._hlo.collective import Collective
from jaxcoll._hlo.hlo import Program
from jaxcoll._plan.scope_names import names, parse_pack
from jaxcoll._report.cost.overlap import compute_exposed, predict_seconds
from jaxcoll._report.cost.rates import Rates
from jaxcoll._report.origins import By, find_origins
from jaxcoll._report.shown_plan import Plan


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled collective, and the requested collectives that it carries out.

    Attributes:
      compiled: the collective.
      requested: positions in `Report.requested` of the collectives it carries out; () if unknown.
      matched_by: "name" if their scope names identify them; "order" if several of one name fit,
        which are then taken in order; "" if `requested` is ().
      changes: descriptions of how the compiler changed the requested collectives.
      packs: the packs of jaxcoll that it carries; () if no scope name says so.
      leaves: paths of the leaves that it carries, whole or in part, if plans are known.
      sources: the lines of Python that requested it, as file:line.
      seconds: the predicted seconds of one execution; None without a prediction.
      exposed_seconds: the predicted seconds of one run that no matrix product hides, or None.
    """

    compiled: Collective
    requested: tuple[int, ...] = ()
    matched_by: By = ""
    changes: tuple[str, ...] = ()
    packs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    seconds: float | None = None
    exposed_seconds: float | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device in one run."""
        return self.compiled.turns * self.compiled.wire_bytes


def make_rows(
    compiled: Program,
    requested: Sequence[Collective] | None,
    plans: Sequence[Plan],
    rates: Rates | None,
) -> tuple[Row, ...]:
    """Make a row for each compiled collective, in the order of the schedule."""
    collectives = compiled.collectives
    origins = find_origins(requested or (), collectives)
    # For each position in `requested`, the number of compiled collectives that carry a part of it.
    carriers = Counter(i for o in origins if not o.repeats for i in o.requested)
    matched = {i for origin in origins for i in origin.requested}
    added = "added by the compiler" if len(matched) == len(requested or ()) else "origin unknown"
    leaves = dict(_leaves_by_pack(plans))
    prices = hidden = [None] * len(collectives)
    if rates is not None:
        prices = [predict_seconds(c, rates) for c in collectives]
        hidden = compute_exposed(collectives, prices, compiled.matmuls, rates)
    rows = []
    for k, (c, origin) in enumerate(zip(collectives, origins, strict=True)):
        before = [(requested or ())[i] for i in origin.requested]
        carried = [*before, c]
        packs = _distinct(parse_pack(name) for x in carried for name in names(x.op_name))
        changes = ["asynchronous"] * c.is_async
        if requested is not None and before:
            is_split = any(carriers[i] > 1 for i in origin.requested)
            changes = [*_changes(before, c, is_split, origin.repeats), *changes]
        elif requested is not None:
            changes = [added, *changes]
        # `_distinct` would drop "", the path of a single array.
        paths = dict.fromkeys(x for pack, of in leaves.items() if pack in packs for x in of)
        sources = _distinct(x.source for x in carried)
        rows.append(Row(
            c, origin.requested, origin.by, tuple(changes), packs, tuple(paths), sources,
            seconds=prices[k], exposed_seconds=hidden[k],
        ))  # fmt: skip
    return tuple(rows)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _leaves_by_pack(plans: Sequence[Plan]) -> Iterator[tuple[str, list[str]]]:
    for plan in plans:
        for k, pack in enumerate(plan.packs):
            yield f"{plan.name}/pack{k}", [plan.leaves[part.leaf].path for part in pack.segments]
        for k, leaf in enumerate(plan.leaves):
            if leaf.gathers:
                yield f"{plan.name}/rows{k}", [leaf.path]


def _changes(
    before: Sequence[Collective], c: Collective, is_split: bool, repeats: bool
) -> Iterator[str]:
    if repeats:
        yield "repeated"
    elif len(before) > 1:
        yield f"merged {len(before)}"
    if is_split:
        yield "split"
    kinds = dict.fromkeys(r.kind for r in before)
    if c.kind not in kinds:
        yield f"was {', '.join(kinds)}"
    wanted, made = _elements(before), _elements([c])
    if wanted.total() == made.total() and wanted != made:
        # The dtypes with fewer elements than requested, and those with more.
        wanted, made = wanted - made, made - wanted
    if not set(made) <= set(wanted):
        yield f"{', '.join(sorted(wanted))} → {', '.join(sorted(made))}"
    if any(r.loops for r in before) and not c.loops:
        yield "moved out of its loop"


def _elements(collectives: Iterable[Collective]) -> Counter[str]:
    elements: Counter[str] = Counter()
    for operand in (operand for c in collectives for operand in c.operands):
        elements[operand.dtype] += operand.size
    return elements
