"""Predict the time of collectives, and how much of it matrix products hide."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxcoll._hlo.collective import Collective, Groups, Matmul
from jaxcoll._report.cost.predict import Group, price_collective
from jaxcoll._report.cost.rates import Rates

_REDUCTIONS = ("all-reduce", "reduce-scatter")
"""The kinds of collective that carry gradients."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of collectives of one kind, counted for each iteration of a loop."""

    kind: str
    nbytes: int = 0  # the payload of one device
    # The part of it in asynchronous collectives with a matrix product scheduled between their start
    # and their end
    behind: int = 0


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Bytes of collectives and FLOP of matrix products that the compiler's schedule overlaps."""

    shares: tuple[Share, ...]  # for each kind of collective that sends anything
    flops: int  # of the matrix products between a start and an end, each product once

    @property
    def reduced(self) -> Share:
        """All-reduces and reduce-scatters together: the collectives that carry gradients."""
        shares = [share for share in self.shares if share.kind in _REDUCTIONS]
        return Share("", sum(s.nbytes for s in shares), sum(s.behind for s in shares))


def add_overlap(collectives: Sequence[Collective], matmuls: Sequence[Matmul]) -> Overlap:
    """Add up the communication that is scheduled to overlap with matrix products.

    A loop without a known trip count counts one iteration. Every branch of a conditional counts. A
    collective in a group of one device sends nothing and does not count.
    """
    sent: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    for c in collectives:
        if c.group_size > 1:
            sent[c.kind] += c.turns * c.nbytes
            if c.is_async and c.meanwhile is not None and c.meanwhile.matmuls > 0:
                behind[c.kind] += c.turns * c.nbytes
    shares = tuple(Share(kind, nbytes, behind[kind]) for kind, nbytes in sent.items())
    overlapping = (m for m, in_flight in _sweep(collectives, matmuls) if in_flight)
    return Overlap(shares, sum(m.turns * m.flops for m in overlapping))


def compute_exposed(
    collectives: Sequence[Collective],
    seconds: Sequence[float],
    matmuls: Sequence[Matmul],
    rates: Rates,
) -> list[float]:
    """Compute each collective's seconds in one run that no matrix product hides.

    A second of matrix products hides one second of one collective, however many are in flight: of
    these, the first to end that is not hidden yet. No other choice hides more in total (F. Glover,
    Maximum matching in a convex bipartite graph, Naval Research Logistics Quarterly 14, 1967).
    Other instructions hide nothing, because their time is not predicted. Nor does a product of a
    dtype whose rate is unknown.
    """
    left = [c.turns * once for c, once in zip(collectives, seconds, strict=True)]
    for m, in_flight in _sweep(collectives, matmuls):
        # Earliest deadline first, which makes greedy hide the most.
        rate = rates.product_rate(m.dtype)
        spare = m.turns * m.flops / rate if rate else 0.0
        while spare > 0 and in_flight:
            k = in_flight[0][1]
            hidden = min(left[k], spare)
            left[k] -= hidden
            spare -= hidden
            if left[k] <= 0:
                heapq.heappop(in_flight)
    return left


def _sweep(
    collectives: Sequence[Collective], matmuls: Sequence[Matmul]
) -> Iterator[tuple[Matmul, list[tuple[int, int]]]]:
    """Yield each product, in order, with the heap of (end, number) of the collectives in flight.

    What is taken from the heap is in flight no longer.
    """
    asynchronous = [k for k, c in enumerate(collectives) if c.is_async and c.group_size > 1]
    # The earliest start is last, where `pop` takes it.
    starts = sorted(asynchronous, key=lambda k: collectives[k].at, reverse=True)
    in_flight: list[tuple[int, int]] = []
    for m in sorted(matmuls, key=lambda m: m.at):
        while starts and collectives[starts[-1]].at < m.at:
            k = starts.pop()
            heapq.heappush(in_flight, (collectives[k].until, k))
        while in_flight and in_flight[0][0] <= m.at:
            heapq.heappop(in_flight)
        yield m, in_flight


def predict_seconds(c: Collective, rates: Rates) -> float:
    """Predict the seconds of one execution of `c`, without contention; 0.0 for a group of one."""
    group = _group(c.groups, rates.per_island)
    if group.n == 1:
        return 0.0
    return price_collective(c.kind, c.nbytes, group, rates).seconds + rates.array * len(c.operands)


@functools.lru_cache(64)
def _group(groups: Groups, per_island: int) -> Group:
    """Count the largest group's devices, the most of them on one island, and its islands."""
    # JAX numbers devices host by host: a device's number divided by an island's size is its island.
    n = near = islands = 1
    for group in groups:
        on = Counter(device // per_island for device in set(group))
        n = max(n, on.total())
        near, islands = max(near, *on.values()), max(islands, len(on))
    return Group(n, near, islands)
