"""Match each compiled collective to the requested ones that it carries out."""

from __future__ import annotations

import bisect
import functools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from jaxcoll._hlo.collective import Collective, Groups
from jaxcoll._plan.scope_names import names

By = Literal["name", "order", ""]


class Origin(NamedTuple):
    """The requested collectives that a compiled one carries out."""

    requested: tuple[int, ...] = ()  # their positions; () if none is known
    by: By = ""
    repeats: bool = False  # a copy of another compiled collective, as in an unrolled loop


def find_origins(requested: Sequence[Collective], compiled: Sequence[Collective]) -> list[Origin]:
    """Match each compiled collective to requested ones, by the scope names that compilers keep.

    A requested collective is matched to no more elements than it has, except by copies that bear
    its name. Collectives of the same kind and groups are matched first, and within these,
    collectives in loops to collectives in loops.
    """
    pools, origins = _Pools(requested), [Origin() for _ in compiled]
    # From the surest match to the least sure one: what a later search could take by mistake has
    # been taken by then.
    for is_alike, minds_loops in ((True, True), (True, False), (False, True), (False, False)):
        for k, c in enumerate(compiled):
            if origins[k].requested or not requested:
                continue
            groups = _members(c) if is_alike else None
            in_loop = bool(c.loops) if minds_loops else None
            pool = pools.find(c.op_name, c.kind, groups, in_loop)
            chosen, is_certain = pool.choose(c)
            if chosen:
                origins[k] = Origin(tuple(sorted(chosen)), "name" if is_certain else "order")
                pools.take(chosen, _size(c))
    # An unmatched collective whose name is already matched is a copy.
    for k, c in enumerate(compiled):
        if not origins[k].requested:
            copied, size = pools.find_copied(c.op_name, c.kind)
            if copied and size >= _size(c):
                origins[k] = Origin(copied, "name", repeats=True)
    return origins


class _Pools:
    """The requested collectives in pools by what a compiled one shares with them."""

    def __init__(self, requested: Sequence[Collective]) -> None:
        self._requested = requested
        self._unmatched = [_size(r) for r in requested]  # elements not matched yet
        self._containing: list[list[_Pool]] = [[] for _ in requested]  # the pools with each
        self._by_name: dict[str, list[int]] = defaultdict(list)
        for i, r in enumerate(requested):
            self._by_name[r.op_name].append(i)
        # A program has thousands of collectives of one name: every search is made once.
        self._find_named = functools.cache(self._search_names)
        self.find = functools.cache(self._make)
        self.find_copied = functools.cache(self._search_copied)

    def _search_names(self, op_name: str) -> list[int]:
        found: set[int] = set()
        for name in dict.fromkeys(names(op_name)):
            parts = name.split("/")
            # Compiled names begin with the callers' scopes: any suffix may be the requested name.
            for start in range(len(parts)):
                found.update(self._by_name.get("/".join(parts[start:]), ()))
        return sorted(found)

    def _make(
        self, op_name: str, kind: str, groups: frozenset[tuple[int, ...]] | None,
        in_loop: bool | None,
    ) -> _Pool:  # fmt: skip
        """Collect what remains of a kind and groups, or without groups of all other kinds."""
        fits = [
            i
            for i in self._find_named(op_name)
            for r in [self._requested[i]]
            if (r.kind != kind if groups is None else r.kind == kind and _members(r) == groups)
            and (in_loop is None or bool(r.loops) == in_loop)
        ]
        pool = _Pool(fits, self._requested, self._unmatched)
        for i in fits:
            self._containing[i].append(pool)
        return pool

    def _search_copied(self, op_name: str, kind: str) -> tuple[tuple[int, ...], int]:
        copied = [i for i in self._find_named(op_name) if self._requested[i].kind == kind]
        return tuple(copied), sum(_size(self._requested[i]) for i in copied)

    def take(self, chosen: Sequence[int], needed: int) -> None:
        """Match so many elements of the `chosen`, one after another."""
        for i in chosen:
            before = self._unmatched[i]
            self._unmatched[i] -= min(before, needed)
            needed -= before - self._unmatched[i]
            for pool in self._containing[i]:
                pool.update(i, before)


class _Pool:
    """Requested collectives that a compiled one may carry out, by their unmatched elements."""

    def __init__(
        self, members: Sequence[int], requested: Sequence[Collective], unmatched: Sequence[int]
    ) -> None:
        self._members, self._requested, self._unmatched = members, requested, unmatched
        self._first = 0  # of the members that have elements left
        self._total = 0
        self._by_size: dict[int, list[int]] = defaultdict(list)  # in order
        # How many there are of each size and of each look; equal looks are interchangeable
        self._looks: dict[int, Counter] = defaultdict(Counter)
        for i in members:
            self._add(i)

    def _add(self, i: int) -> None:
        if size := self._unmatched[i]:
            self._total += size
            bisect.insort(self._by_size[size], i)
            self._looks[size][self._look(i)] += 1

    def _look(self, i: int) -> tuple:
        r = self._requested[i]
        return r.op_name, r.source, r.operands

    def update(self, i: int, before: int) -> None:
        """Take note that member `i` had `before` unmatched elements."""
        if before and before != self._unmatched[i]:
            self._total -= before
            alike, looks, look = self._by_size[before], self._looks[before], self._look(i)
            del alike[bisect.bisect_left(alike, i)]
            if not alike:
                del self._by_size[before]
            looks[look] -= 1
            if not looks[look]:
                del looks[look]
            self._add(i)

    def _remaining(self) -> Iterator[int]:
        members, unmatched = self._members, self._unmatched
        while self._first < len(members) and not unmatched[members[self._first]]:
            self._first += 1
        return (members[k] for k in range(self._first, len(members)) if unmatched[members[k]])

    def choose(self, c: Collective) -> tuple[list[int], bool]:
        """Choose members whose elements add up to `c`'s; False if others fit as well."""
        total = _size(c)
        # All of them together have exactly as many elements: no other choice is possible.
        if self._total == total:
            return list(self._remaining()), True
        wanted = Counter(operand.size for operand in c.operands)
        chosen = [i for size, n in wanted.items() for i in self._by_size.get(size, [])[:n]]
        if sum(self._unmatched[i] for i in chosen) == total:
            return chosen, all(
                len(self._by_size.get(size, ())) == n or len(self._looks[size]) == 1
                for size, n in wanted.items()
            )
        if chosen := self._find_neighbours(total):
            return chosen, False
        # It may be a part of a larger one.
        parts = sorted(i for n, alike in self._by_size.items() if n > total for i in alike[:2])
        return parts[:1], len(parts) == 1

    def _find_neighbours(self, total: int) -> list[int]:
        if min(self._by_size, default=total + 1) > total:
            return []
        # All sizes are above 0, so a sliding window finds every range that adds up to `total`.
        window: deque[int] = deque()
        spent = 0
        for i in self._remaining():
            window.append(i)
            spent += self._unmatched[i]
            while spent > total:
                spent -= self._unmatched[window.popleft()]
            if spent == total:
                return list(window)
        return []


def _members(c: Collective) -> frozenset[tuple[int, ...]]:
    """Sort the groups, whose order and whose devices' order say nothing."""
    return _sort_groups(c.groups, c.kind == "collective-permute")


@functools.lru_cache(256)
def _sort_groups(groups: Groups, is_ordered: bool) -> frozenset[tuple[int, ...]]:
    return frozenset(groups if is_ordered else (tuple(sorted(group)) for group in groups))


def _size(c: Collective) -> int:
    return sum(operand.size for operand in c.operands)
