"""Set requested and compiled collectives side by side: which came out of which."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from jaxcoll._observe.parse.collective import Collective
from jaxcoll._plan.scope_names import names

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
class Origin:
    """The requested collectives that a compiled one carries out."""

    requested: tuple[int, ...] = ()  # their positions among the requested ones; () if none is known
    # "name": the compiler kept their names. "shape": sizes, kinds and groups fit in one way only.
    # "order": several fit, and were taken in their order. "": it is not known, or the compiler
    # added the collective
    by: By = ""
    repeats: bool = False  # another already does it, as when a loop is unrolled


def join(requested: Sequence[Collective], compiled: Sequence[Collective]) -> tuple[Origin, ...]:
    """Find what each compiled collective carries out of what was requested.

    Nothing requested is spent on more elements than it has, except by copies that bear its own
    name; in a text without names, sizes decide, and then order, and the result says so.
    """
    joiner = _Joiner(requested, compiled)
    for alike in (operator.eq, lambda wanted, made: made in _BECOMES.get(wanted, ())):
        for in_loop in (True, False):
            joiner.spend(functools.partial(_fits, alike, in_loop))
    joiner.repeat()
    return tuple(joiner.origins)


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


class _Joiner:
    """Elements that are still to be accounted for, on both sides."""

    def __init__(self, requested: Sequence[Collective], compiled: Sequence[Collective]) -> None:
        self._requested, self._compiled = requested, compiled
        self._left = [_size(r) for r in requested]
        self.origins = [Origin() for _ in compiled]
        self._by_name: dict[str, list[int]] = {}
        for i, r in enumerate(requested):
            self._by_name.setdefault(r.op_name, []).append(i)

    def spend(self, fits: Fits) -> None:
        """Join what fits: by name first, and what then remains by size."""
        waiting = [k for k, origin in enumerate(self.origins) if not origin.requested]
        # All names before any size: a guess must not take what another bears the name of.
        for k in waiting:
            self._join(k, self._named(k), fits, "name")
        for k in waiting:
            if not self.origins[k].requested:
                self._join(k, range(len(self._left)), fits, "shape")

    def repeat(self) -> None:
        """Take what is left over and bears a name that is spent already for a copy."""
        for k, c in enumerate(self._compiled):
            if not self.origins[k].requested:
                copied = [i for i in self._named(k) if self._requested[i].kind == c.kind]
                if copied and sum(_size(self._requested[i]) for i in copied) >= _size(c):
                    self.origins[k] = Origin(tuple(copied), "name", repeats=True)

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
            self.origins[k] = Origin(tuple(sorted(taken)), by if is_certain else "order")
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
        alike = {
            (r.op_name, r.source, r.operands) for r in map(self._requested.__getitem__, requested)
        }
        return len(alike) == 1 and bool(self._requested[requested[0]].op_name)

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
