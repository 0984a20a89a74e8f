"""What a report knows, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxcoll._observe.match import Origin
from jaxcoll._observe.overlap import Overlap, exposed, overlap, predicted
from jaxcoll._observe.parse.calls import Loop, Matmul
from jaxcoll._observe.parse.collective import Collective, runs, wire_bytes
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.scope_names import names, pack_of
from jaxcoll._prices.rates import Rates


@dataclasses.dataclass(frozen=True)
class PackedLeaves:
    """What one pack of a plan carries."""

    name: str  # the reduction's name and the pack's number, as the program's scopes have them
    dtype: str  # the type it was planned to travel in
    nbytes: int  # bytes of it that one replica puts in
    leaves: tuple[str, ...]  # their paths in the reduced tree, "" for a bare array


@dataclasses.dataclass(frozen=True)
class ReportData:
    """A report as text, JSON and pictures read it; `Report` says what each attribute is."""

    name: str
    where: str
    devices: int
    requested: tuple[Collective, ...] | None
    collectives: tuple[Collective, ...]
    origins: tuple[Origin, ...]
    packs: tuple[PackedLeaves, ...]
    matmuls: tuple[Matmul, ...]
    loops: tuple[Loop, ...]
    instructions: int
    uncounted: tuple[str, ...]
    notes: tuple[str, ...]
    terms: Rates | None = None
    memory_bytes: int | None = None
    plans: tuple[Plan, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def count(self) -> int:
        """Collectives of the compiled program, each once however often its loop turns."""
        return len(self.collectives)

    @property
    def runs(self) -> int:
        """Collectives that one run carries out; a loop that does not say counts one turn."""
        return runs(self.collectives)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device when the program runs once.

        They are what a byte-optimal implementation of each collective sends. A loop that does
        not say how often it turns counts one turn, and `uncounted` says so.
        """
        return wire_bytes(self.collectives)

    @property
    def requested_wire_bytes(self) -> int | None:
        """Likewise, of the program as it was requested; None if that is not known."""
        if self.requested is None:
            return None
        both = zip(self.requested, self.trips, strict=True)
        return wire_bytes(dataclasses.replace(r, trips=trips) for r, trips in both)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Positions in `requested` of which nothing is seen in the compiled program."""
        carried = {i for origin in self.origins for i in origin.requested}
        return tuple(i for i in range(len(self.requested or ())) if i not in carried)

    @functools.cached_property
    def carriers(self) -> Counter[int]:
        """For each position in `requested`, how many collectives share it among them."""
        shared = (origin.requested for origin in self.origins if not origin.again)
        return Counter(i for requested in shared for i in requested)

    @property
    def trips(self) -> list[int | None]:
        """`requested_trips` of each of `requested`."""
        return [self.requested_trips(i) for i in range(len(self.requested or ()))]

    def requested_trips(self, i: int) -> int | None:
        """How often one run carries out `requested[i]`; loops are asked in the compiled program."""
        found = (self.requested or ())[i]
        if found.trips is not None:
            return found.trips
        turns = [
            (origin.again, c.trips)
            for origin, c in zip(self.origins, self.collectives, strict=True)
            if i in origin.requested
        ]
        if not turns or any(trips is None for _, trips in turns):
            return None
        # Parts of one collective run side by side, so their turns are not added; repetitions are.
        first = max((t for again, t in turns if not again and t is not None), default=0)
        return first + sum(t for again, t in turns if again and t is not None)

    def changes(self, k: int) -> tuple[str, ...]:
        """What the compiler did to `collectives[k]`, in words."""
        return tuple(self._changes(k))

    def _changes(self, k: int) -> Iterator[str]:
        c, origin = self.collectives[k], self.origins[k]
        if self.requested is not None:
            asked = [self.requested[i] for i in origin.requested]
            if not asked:
                yield "added by the compiler" if not self.dropped else "origin unknown"
            if origin.again:
                yield "repeated"
            elif len(asked) > 1:
                yield f"merged {len(asked)}"
            if any(self.carriers[i] > 1 for i in origin.requested):
                yield "split"
            before = Counter(r.kind for r in asked)
            if asked and c.kind not in before:
                yield f"was {', '.join(before)}"
            yield from _dtype_change(asked, c)
            if asked and any(r.loops for r in asked) and not c.loops:
                yield "out of its loop"
        if c.is_async:
            yield "asynchronous"

    def packs_of(self, k: int) -> tuple[str, ...]:
        """The packs of jaxcoll that `collectives[k]` carries; () where no name says so."""
        origin, compiled = self.origins[k], self.collectives[k]
        asked = [names((self.requested or ())[i].op_name) for i in origin.requested]
        found = [pack_of(n) for each in [*asked, names(compiled.op_name)] for n in each]
        return tuple(dict.fromkeys(filter(None, found)))

    def leaves_of(self, k: int) -> tuple[str, ...]:
        """Paths of the leaves that `collectives[k]` carries, whole or in part, if plans say."""
        known = {pack.name: pack.leaves for pack in self.packs}
        found = (leaf for name in self.packs_of(k) for leaf in known.get(name, ()))
        return tuple(dict.fromkeys(found))

    def sources_of(self, k: int) -> tuple[str, ...]:
        """The lines of Python that asked for `collectives[k]`, as file:line."""
        asked = [(self.requested or ())[i].source for i in self.origins[k].requested]
        return tuple(dict.fromkeys(filter(None, [*asked, self.collectives[k].source])))

    @functools.cached_property
    def _each_time(self) -> list[float] | None:
        terms = self.terms
        return None if terms is None else [predicted(c, terms) for c in self.collectives]

    def seconds_of(self, k: int) -> float | None:
        """What the cost model expects `collectives[k]` to take each time; None without terms."""
        return None if self._each_time is None else self._each_time[k]

    @functools.cached_property
    def overlap(self) -> Overlap:
        """What the schedule hides behind matrix products, in bytes and operations."""
        return overlap(self.collectives, self.matmuls)

    @property
    def overlapped(self) -> float | None:
        """Share of the reduced bytes that travel behind matrix products; None if none is reduced.

        Counted are all-reduces and reduce-scatters, loops' turns included; behind products are
        those in asynchronous collectives with a product scheduled between their start and end.
        """
        reduced = self.overlap.reduced
        return reduced.behind / reduced.nbytes if reduced.nbytes else None

    @functools.cached_property
    def seconds(self) -> float | None:
        """What the cost model expects one run to communicate; None without terms."""
        if (each := self._each_time) is None:
            return None
        return sum(c.turns * s for c, s in zip(self.collectives, each, strict=True))

    @property
    def exposed_seconds(self) -> float | None:
        """Of `seconds`, what no matrix product hides (docs/cost_model.md); None if not known."""
        left = self._exposed
        return None if left is None else sum(left)

    def exposed_of(self, k: int) -> float | None:
        """Seconds of `collectives[k]` in one run that no product hides; None if not known."""
        return None if self._exposed is None else self._exposed[k]

    @functools.cached_property
    def _exposed(self) -> list[float] | None:
        if self.terms is None or (each := self._each_time) is None:
            return None
        return exposed(self.collectives, each, self.matmuls, self.terms)


def _dtype_change(asked: Sequence[Collective], c: Collective) -> Iterator[str]:
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
