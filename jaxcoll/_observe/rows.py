"""Rows of a report: each compiled collective beside what was requested of it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from jaxcoll._observe.overlap import exposed, predicted
from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.parse.hlo import Program
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.scope_names import names, pack_of
from jaxcoll._prices.rates import Rates

By = Literal["name", "shape", "order", ""]
Fits = Callable[[Collective, Collective], bool]

_BECOMES = {
    "all-reduce": {"reduce-scatter", "all-gather", "collective-permute"},
    "reduce-scatter": {"all-reduce", "all-to-all"},
    "all-gather": {"all-reduce", "collective-broadcast", "collective-permute", "all-to-all"},
    "all-to-all": {"collective-permute", "all-gather"},
    "collective-broadcast": {"all-reduce", "collective-permute"},
}


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
      exposed_seconds: the part of one run's that no matrix product hides; None likewise.
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
    origins = _Joiner(requested or (), collectives).join()
    # For each position in `requested`, how many collectives share it among them.
    carriers = Counter(i for o in origins if not o.repeats for i in o.requested)
    matched = {i for origin in origins for i in origin.requested}
    added = "added by the compiler" if len(matched) == len(requested or ()) else "origin unknown"
    leaves = dict(_leaves_by_pack(plans))
    prices = hidden = [None] * len(collectives)
    if rates is not None:
        prices = [predicted(c, rates) for c in collectives]
        hidden = exposed(collectives, prices, compiled.matmuls, rates)
    rows = []
    for k, (c, origin) in enumerate(zip(collectives, origins, strict=True)):
        before = [(requested or ())[i] for i in origin.requested]
        carried = [*before, c]
        packs = _distinct(pack_of(name) for x in carried for name in names(x.op_name))
        changes = ["asynchronous"] * c.is_async
        if requested is not None and before:
            is_split = any(carriers[i] > 1 for i in origin.requested)
            changes = [*_changes(before, c, is_split, origin.repeats), *changes]
        elif requested is not None:
            changes = [added, *changes]
        row = Row(
            compiled=c,
            requested=origin.requested,
            matched_by=origin.by,
            changes=tuple(changes),
            packs=packs,
            leaves=tuple(  # "" is a path, too
                dict.fromkeys(
                    path for pack, paths in leaves.items() if pack in packs for path in paths
                )
            ),
            sources=_distinct(x.source for x in carried),
            seconds=prices[k],
            exposed_seconds=hidden[k],
        )
        rows.append(row)
    return tuple(rows)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _leaves_by_pack(plans: Sequence[Plan]) -> Iterator[tuple[str, list[str]]]:
    """Yield each pack, as the program's scopes name it, with the paths of its leaves."""
    for plan in plans:
        for k, pack in enumerate(plan.packs):
            yield f"{plan.name}/pack{k}", [plan.leaves[part.leaf].path for part in pack.segments]
        for k, leaf in enumerate(plan.leaves):
            if leaf.gathers:
                yield f"{plan.name}/rows{k}", [leaf.path]


def _changes(
    before: Sequence[Collective], c: Collective, is_split: bool, repeats: bool
) -> Iterator[str]:
    """Yield what became of the collectives that `c` carries out, in words."""
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
        # The types that fewer elements have than was requested, and those that more have.
        wanted, made = wanted - made, made - wanted
        yield f"{', '.join(sorted(wanted))} → {', '.join(sorted(made))}"
    elif not set(made) <= set(wanted):
        yield f"{', '.join(sorted(wanted))} → {', '.join(sorted(made))}"
    if any(r.loops for r in before) and not c.loops:
        yield "out of its loop"


def _elements(collectives: Iterable[Collective]) -> Counter[str]:
    elements: Counter[str] = Counter()
    for operand in (operand for c in collectives for operand in c.operands):
        elements[operand.dtype] += operand.size
    return elements


class Origin(NamedTuple):
    """The requested collectives that a compiled one carries out."""

    requested: tuple[int, ...] = ()  # their positions among the requested ones; () if none is known
    by: By = ""
    repeats: bool = False  # another already does it, as when a loop is unrolled


class _Joiner:
    """Finds what each compiled collective carries out of what was requested.

    Nothing requested is spent on more elements than it has, except by copies that bear its own
    name; in a text without names, sizes decide, and then order, and the result says so.
    """

    def __init__(self, requested: Sequence[Collective], compiled: Sequence[Collective]) -> None:
        self._requested, self._compiled = requested, compiled
        self._left = [_size(r) for r in requested]  # elements that are still to be accounted for
        self._origins = [Origin() for _ in compiled]
        self._by_name: dict[str, list[int]] = {}
        for i, r in enumerate(requested):
            self._by_name.setdefault(r.op_name, []).append(i)

    def join(self) -> list[Origin]:
        """Join like to like first, and in loops to in loops; by name, and the rest by size."""
        for alike in (operator.eq, lambda wanted, made: made in _BECOMES.get(wanted, ())):
            for in_loop in (True, False):
                fits = functools.partial(_fits, alike, in_loop)
                # All names before any size: a guess must not take what another bears the name of.
                for k in self._waiting():
                    self._join(k, self._named(k), fits, "name")
                for k in self._waiting():
                    self._join(k, range(len(self._left)), fits, "shape")
        # What is left over and bears a name that is spent already is a copy.
        for k in self._waiting():
            c = self._compiled[k]
            copied = [i for i in self._named(k) if self._requested[i].kind == c.kind]
            if copied and sum(_size(self._requested[i]) for i in copied) >= _size(c):
                self._origins[k] = Origin(tuple(copied), "name", repeats=True)
        return self._origins

    def _waiting(self) -> list[int]:
        return [k for k, origin in enumerate(self._origins) if not origin.requested]

    def _named(self, k: int) -> list[int]:
        """Return what is requested under a name that the compiled collective bears."""
        named: set[int] = set()
        for name in dict.fromkeys(names(self._compiled[k].op_name)):
            parts = name.split("/")
            # Compiled names have the scopes of callers in front: any tail may be the name.
            for start in range(len(parts)):
                named.update(self._by_name.get("/".join(parts[start:]), ()))
        return sorted(named)

    def _join(self, k: int, among: Sequence[int], fits: Fits, by: By) -> None:
        c = self._compiled[k]
        free = [i for i in among if self._left[i] and fits(self._requested[i], c)]
        taken, is_certain = self._chosen(free, c)
        if taken:
            self._origins[k] = Origin(tuple(sorted(taken)), by if is_certain else "order")
            left = _size(c)
            for i in taken:
                spent = min(self._left[i], left)
                self._left[i] -= spent
                left -= spent

    def _chosen(self, free: Sequence[int], c: Collective) -> tuple[list[int], bool]:
        """Choose those of `free` that have the elements of `c`; False if others might, too."""
        total = _size(c)
        # All that fits together has just these elements: no other choice is possible.
        if sum(self._left[i] for i in free) == total:
            return list(free), True
        by_size: dict[int, list[int]] = {}
        for i in free:
            by_size.setdefault(self._left[i], []).append(i)
        wanted = Counter(operand.size for operand in c.operands)
        taken = [i for size, n in wanted.items() for i in by_size.get(size, [])[:n]]
        if sum(self._left[i] for i in taken) == total:
            return taken, all(
                len(by_size[size]) == n or self._is_one_kind(by_size[size])
                for size, n in wanted.items()
            )
        # The compiler combines neighbours, which were neighbours in the request, too.
        if run := self._run(free, total):
            return run, False
        larger = [i for i in free if self._left[i] > total]  # it is a part of one
        return larger[:1], len(larger) == 1

    def _is_one_kind(self, requested: Sequence[int]) -> bool:
        """Return True if it makes no difference which of them it is."""
        named = [self._requested[i] for i in requested]
        return (
            bool(named[0].op_name) and len({(r.op_name, r.source, r.operands) for r in named}) == 1
        )

    def _run(self, free: Sequence[int], total: int) -> list[int]:
        """Return neighbours that have `total` elements together; [] if none have."""
        # All sizes are above 0, so that a window which grows and shrinks meets every run.
        start = spent = 0
        for end, i in enumerate(free):
            spent += self._left[i]
            while spent > total:
                spent -= self._left[free[start]]
                start += 1
            if spent == total:
                return list(free[start : end + 1])
        return []


def _fits(alike: Callable[[str, str], bool], in_loop: bool, r: Collective, c: Collective) -> bool:
    return (
        alike(r.kind, c.kind)
        and (not in_loop or bool(r.loops) == bool(c.loops))
        and (r.kind != c.kind or _members(r) == _members(c))
    )


def _members(c: Collective) -> frozenset[tuple[int, ...]]:
    """Return the groups, in whichever order they and their devices were written."""
    if c.kind == "collective-permute":
        return frozenset(c.groups)
    return frozenset(tuple(sorted(group)) for group in c.groups)


def _size(c: Collective) -> int:
    return sum(operand.size for operand in c.operands)
