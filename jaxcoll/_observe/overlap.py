"""Predict what collectives take, and how much of it matrix products hide."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxcoll._observe.parse.collective import Collective, Groups, Matmul
from jaxcoll._prices.predict import Group, collective
from jaxcoll._prices.rates import Rates

_REDUCTIONS = ("all-reduce", "reduce-scatter")
"""The kinds of collective that carry gradients."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of collectives of one kind, each turn of a loop counted."""

    kind: str
    nbytes: int = 0  # what one device puts in
    # Of these, bytes in asynchronous collectives that have a matrix product scheduled between their
    # start and their end
    behind: int = 0


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Bytes and operations that the compiler's schedule puts side by side."""

    shares: tuple[Share, ...]  # for each kind of collective that sends anything
    flops: int  # operations of the matrix products between a start and an end, each product once

    @property
    def reduced(self) -> Share:
        """All-reduces and reduce-scatters together, in which gradients travel."""
        shares = [share for share in self.shares if share.kind in _REDUCTIONS]
        return Share("", sum(s.nbytes for s in shares), sum(s.behind for s in shares))


def overlap(collectives: Sequence[Collective], matmuls: Sequence[Matmul]) -> Overlap:
    """Add up what is scheduled behind matrix products.

    A loop that does not say how often it turns counts one turn; of a conditional every branch
    counts; a collective among one device sends nothing and does not count.
    """
    sent: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    for c in collectives:
        if c.group_size > 1:
            sent[c.kind] += c.turns * c.nbytes
            if c.is_async and c.meanwhile is not None and c.meanwhile.matmuls > 0:
                behind[c.kind] += c.turns * c.nbytes
    shares = tuple(Share(kind, nbytes, behind[kind]) for kind, nbytes in sent.items())
    beside = (m for m, under_way in _meetings(collectives, matmuls) if under_way)
    return Overlap(shares, sum(m.turns * m.flops for m in beside))


def exposed(
    collectives: Sequence[Collective],
    seconds: Sequence[float],
    matmuls: Sequence[Matmul],
    rates: Rates,
) -> list[float]:
    """Return each collective's seconds in one run that no matrix product hides.

    A second of matrix products hides a second of one collective, and no more, however many
    are under way: of those it stands between start and end of, the one that ends first and is
    not hidden yet. No other choice hides more in all (F. Glover, Maximum matching in a convex
    bipartite graph, Naval Research Logistics Quarterly 14, 1967). Only matrix products hide:
    what else runs meanwhile is not priced. A product of a type of unknown rate hides nothing.
    """
    left = [c.turns * once for c, once in zip(collectives, seconds, strict=True)]
    for m, under_way in _meetings(collectives, matmuls):
        # Earliest deadline first: `under_way` is sorted by end, which makes greedy hide the most.
        rate = rates.product_rate(m.dtype)
        spare = m.turns * m.flops / rate if rate else 0.0
        for k in under_way:
            hidden = min(left[k], spare)
            left[k] -= hidden
            spare -= hidden
    return left


def _meetings(
    collectives: Sequence[Collective], matmuls: Sequence[Matmul]
) -> Iterator[tuple[Matmul, list[int]]]:
    """Yield each product, in order, and the collectives under way, the first to end in front."""
    asynchronous = [k for k, c in enumerate(collectives) if c.is_async and c.group_size > 1]
    # The earliest start is last, where `pop` takes it.
    starts = sorted(asynchronous, key=lambda k: collectives[k].at, reverse=True)
    under_way: list[tuple[int, int]] = []
    for m in sorted(matmuls, key=lambda m: m.at):
        while starts and collectives[starts[-1]].at < m.at:
            k = starts.pop()
            heapq.heappush(under_way, (collectives[k].until, k))
        while under_way and under_way[0][0] <= m.at:
            heapq.heappop(under_way)
        yield m, [k for _, k in sorted(under_way)]


def predicted(c: Collective, rates: Rates) -> float:
    """Return the seconds of `c` each time, alone; 0.0 for a group of one."""
    group = _group(c.groups, rates.per_island)
    if group.n == 1:
        return 0.0
    return collective(c.kind, c.nbytes, group, rates).seconds + rates.array * len(c.operands)


@functools.lru_cache(64)
def _group(groups: Groups, per_island: int) -> Group:
    """Count devices of the largest group, most of them on one island, and islands of it."""
    # JAX numbers devices host by host, so a number divided by the size of an island is the island.
    n = near = islands = 1
    for group in groups:
        on = Counter(device // per_island for device in set(group))
        n = max(n, on.total())
        near, islands = max(near, *on.values()), max(islands, len(on))
    return Group(n, near, islands)
