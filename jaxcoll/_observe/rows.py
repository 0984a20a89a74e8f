"""Rows of a report: each compiled collective beside what was requested of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxcoll._observe.match import By, Origin, join
from jaxcoll._observe.overlap import exposed, predicted
from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.parse.hlo import Program
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.scope_names import names, pack_of
from jaxcoll._prices.rates import Rates


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled collective, beside what was requested of it.

    Attributes:
      compiled: the collective.
      requested: positions in `Report.requested` of what it carries out; () if that is not known.
      matched_by: "name" if the compiler kept their names, "shape" if sizes, kinds and groups fit
        in one way only, "order" if several fit and were taken in their order; "" for ().
      changes: what the compiler did to what was requested, in words.
      packs: the packs of jaxcoll that it carries; () where no name says so.
      leaves: paths of the leaves that it carries, whole or in part, where plans say.
      sources: the lines of Python that asked for it, as file:line.
      seconds: the prediction for each time it is carried out; None if there is none.
      exposed_seconds: the part of one run's that no matrix product hides; None if not known.
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


def rows_of(
    compiled: Program,
    requested: Sequence[Collective] | None,
    plans: Sequence[Plan],
    rates: Rates | None,
) -> tuple[Row, ...]:
    """Return a row for each compiled collective, in the order of the schedule."""
    collectives = compiled.collectives
    origins = join(requested or (), collectives)
    changes = _Changes(requested, origins)
    leaves = _leaves_by_pack(plans)
    unknown: list[float | None] = [None] * len(collectives)
    seconds, exposures = unknown, unknown
    if rates is not None:
        prices = [predicted(c, rates) for c in collectives]
        seconds = [*prices]
        exposures = [*(exposed(collectives, prices, compiled.matmuls, rates) or unknown)]
    rows = []
    for c, origin, price, exposure in zip(collectives, origins, seconds, exposures, strict=True):
        carried = [*((requested or ())[i] for i in origin.requested), c]
        packs = _distinct(pack_of(name) for x in carried for name in names(x.op_name))
        row = Row(
            compiled=c,
            requested=origin.requested,
            matched_by=origin.by,
            changes=tuple(changes.of(c, origin)),
            packs=packs,
            leaves=_distinct_paths(paths for pack, paths in leaves.items() if pack in packs),
            sources=_distinct(x.source for x in carried),
            seconds=price,
            exposed_seconds=exposure,
        )
        rows.append(row)
    return tuple(rows)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _distinct_paths(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(paths)))  # "" is a path, too


def _leaves_by_pack(plans: Sequence[Plan]) -> dict[str, tuple[str, ...]]:
    """Map each pack, as the program's scopes name it, to the paths of its leaves."""
    leaves: dict[str, tuple[str, ...]] = {}
    for plan in plans:
        for k, pack in enumerate(plan.packs):
            paths = (plan.leaves[segment.leaf].path for segment in pack.segments)
            leaves[f"{plan.name}/pack{k}"] = tuple(dict.fromkeys(paths))
        for k, leaf in enumerate(plan.leaves):
            if leaf.gathers:
                leaves[f"{plan.name}/rows{k}"] = (leaf.path,)
    return leaves


class _Changes:
    """The compiler's changes, in words."""

    def __init__(self, requested: Sequence[Collective] | None, origins: Sequence[Origin]) -> None:
        self._requested = requested
        # For each position in `requested`, how many collectives share it among them.
        self._carriers = Counter(i for o in origins if not o.repeats for i in o.requested)
        matched = {i for origin in origins for i in origin.requested}
        self._all_matched = len(matched) == len(requested or ())

    def of(self, c: Collective, origin: Origin) -> Iterator[str]:
        """Yield what became of what `c` carries out."""
        if self._requested is not None:
            before = [self._requested[i] for i in origin.requested]
            if not before:
                yield "added by the compiler" if self._all_matched else "origin unknown"
            if origin.repeats:
                yield "repeated"
            elif len(before) > 1:
                yield f"merged {len(before)}"
            if any(self._carriers[i] > 1 for i in origin.requested):
                yield "split"
            kinds = dict.fromkeys(r.kind for r in before)
            if before and c.kind not in kinds:
                yield f"was {', '.join(kinds)}"
            yield from _dtype_change(before, c)
            if any(r.loops for r in before) and not c.loops:
                yield "out of its loop"
        if c.is_async:
            yield "asynchronous"


def _dtype_change(before: Sequence[Collective], c: Collective) -> Iterator[str]:
    """Yield the types that fewer elements have than was requested, and those that more have."""
    wanted, made = _elements(before), _elements([c])
    if wanted.total() == made.total() and wanted != made:
        fewer, more = sorted(wanted - made), sorted(made - wanted)
        yield f"{', '.join(fewer)} → {', '.join(more)}"
    elif before and not set(made) <= set(wanted):
        yield f"{', '.join(sorted(wanted))} → {', '.join(sorted(made))}"


def _elements(collectives: Iterable[Collective]) -> Counter[str]:
    elements: Counter[str] = Counter()
    for c in collectives:
        for operand in c.operands:
            elements[operand.dtype] += operand.size
    return elements
