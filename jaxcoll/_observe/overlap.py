"""What collectives take by the cost model, and how much of it matrix products hide."""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcoll._observe.parse.calls import Matmul
from jaxcoll._observe.parse.collective import Collective, Groups
from jaxcoll._prices.predict import Group, collective
from jaxcoll._prices.rates import Rates

REDUCTIONS = ("all-reduce", "reduce-scatter")
"""The kinds of collective that carry gradients."""


class Share(NamedTuple):
    """Bytes of collectives of one kind, each turn of a loop counted."""

    nbytes: int = 0  # what one device puts in
    # Of these, bytes in asynchronous collectives that have a matrix product scheduled between their
    # start and their end
    behind: int = 0


class Overlap(NamedTuple):
    """What the compiler's schedule hides."""

    shares: dict[str, Share]  # for each kind of collective that sends anything, its share
    flops: int  # operations of the matrix products between a start and an end, each product once

    @property
    def reduced(self) -> Share:
        """What gradients travel in: all-reduces and reduce-scatters together."""
        found = [self.shares[kind] for kind in REDUCTIONS if kind in self.shares]
        return Share(sum(s.nbytes for s in found), sum(s.behind for s in found))


def overlap(collectives: Sequence[Collective], matmuls: Sequence[Matmul]) -> Overlap:
    """What is scheduled behind matrix products.

    Law: a loop that does not say how often it turns counts one turn; of a conditional every
    branch counts; a collective among one device sends nothing and does not count.
    """
    sent: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    for c in collectives:
        if c.group_size > 1:
            sent[c.kind] += c.turns * c.nbytes
            if c.is_async and c.meanwhile is not None and c.meanwhile.matmuls > 0:
                behind[c.kind] += c.turns * c.nbytes
    shares = {kind: Share(nbytes, behind[kind]) for kind, nbytes in sent.items()}
    inside = (m for m, open_now in _meetings(collectives, matmuls) if open_now)
    return Overlap(shares, sum(m.turns * m.flops for m in inside))


def exposed(
    collectives: Sequence[Collective],
    seconds: Sequence[float],
    matmuls: Sequence[Matmul],
    terms: Rates,
) -> list[float] | None:
    """Of each collective the seconds in one run that no matrix product hides.

    Law: a second of matrix products hides a second of one collective, and no more, however many
    are under way: of those it stands between start and end of, the one that ends first and is
    not hidden yet. No other choice hides more in all (F. Glover, Maximum matching in a convex
    bipartite graph, Naval Research Logistics Quarterly 14, 1967). Only matrix products hide:
    what else runs meanwhile is not priced. A product of a type of unknown rate hides nothing; it is
    None if products stand beside collectives, and the rate of no type is known.
    """
    left = [c.turns * each for c, each in zip(collectives, seconds, strict=True)]
    for m, open_now in _meetings(collectives, matmuls):
        if open_now and not terms.products:
            return None
        # Earliest deadline first: `open_now` is sorted by end, which makes greedy hide the most.
        rate = terms.product_rate(m.dtype)
        spare = m.turns * m.flops / rate if rate else 0.0
        for k in open_now:
            hidden = min(left[k], spare)
            left[k] -= hidden
            spare -= hidden
    return left


def _meetings(
    collectives: Sequence[Collective], matmuls: Sequence[Matmul]
) -> Iterator[tuple[Matmul, list[int]]]:
    """Each product, in order, with the collectives under way, those that end first in front."""
    asynchronous = [k for k, c in enumerate(collectives) if c.is_async and c.group_size > 1]
    # The earliest start is last, where `pop` takes it.
    starts = sorted(asynchronous, key=lambda k: collectives[k].at, reverse=True)
    open_now: list[tuple[int, int]] = []
    for m in sorted(matmuls, key=lambda m: m.at):
        while starts and collectives[starts[-1]].at < m.at:
            k = starts.pop()
            heapq.heappush(open_now, (collectives[k].until, k))
        while open_now and open_now[0][0] <= m.at:
            heapq.heappop(open_now)
        yield m, [k for _, k in sorted(open_now)]


def predicted(c: Collective, terms: Rates) -> float:
    """Seconds of `c` each time it is carried out, alone; 0.0 for a group of one."""
    group = _group(c.groups, terms.per_island)
    if group.n == 1:
        return 0.0
    return collective(c.kind, c.nbytes, group, terms).seconds + terms.array * len(c.operands)


@functools.lru_cache(64)
def _group(groups: Groups, per_island: int) -> Group:
    """Devices of the largest group, most of them on one island, and islands of it."""
    # JAX numbers devices host by host, so a number divided by the size of an island is the island.
    n = near = islands = 1
    for group in groups:
        met = Counter(device // per_island for device in set(group))
        n = max(n, met.total())
        near, islands = max(near, *met.values()), max(islands, len(met))
    return Group(n, near, islands)
