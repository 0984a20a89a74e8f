"""Seconds of a reduction: from shapes, a composition of algorithms, and rates.

The formulas are the standard ones (see `_plan/algorithms.py`), with one addition for an all-reduce
that the backend carries out flat over several islands: its bytes cross by the links of all p
devices of an island at once. Sent round a ring, 2(n-1)/n of the array crosses; between two islands
only one array each way, since a tree does as well. NCCL's own model makes the same exception.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxcoll._plan.algorithms import Stage, steps
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.plan import Cost, Plan
from jaxcoll._prices.rates import Curve, Rates, rates_of

OPERANDS = 256
"""Most arrays that XLA's combiners make one collective of (xla/service/collective_utils.h)."""


Load = tuple[tuple[Stage, ...], int, int]
"""Stages that sum an array, its bytes, and the pieces of leaves copied into it and out again; 0: it
is a leaf itself."""


def predict(plan: CollectivePlan) -> Plan:
    """Return the plan with the seconds that it is predicted to take, packs one after another."""
    shown, rates = Plan.of(plan), rates_of(plan.world)
    if rates is None:
        return shown
    rates = dataclasses.replace(rates, combine=0) if plan.overlap else rates
    loads = Counter[Load](
        (plan.stages(pack), pack.nbytes, 0 if pack.is_leaf(plan.leaves) else len(pack.segments))
        for pack in plan.packs
    )
    cost = cost_of_loads(loads, plan.world.sizes, rates)
    if plan.collective != "all_reduce":  # half of the steps and bytes; only one of the halves adds
        adds = plan.collective == "reduce_scatter"
        halves = (cost.latency / 2, cost.bandwidth / 2, cost.reduction * adds, cost.copy / 2)
        cost = Cost(*halves)
    return dataclasses.replace(shown, predicted=dataclasses.replace(cost, source=rates.source))


def cost_of_loads(loads: Mapping[Load, int], sizes: tuple[int, ...], rates: Rates) -> Cost:
    """Return the cost of so many arrays of each kind, copies and handing over included.

    Arrays that the compiler sums by its own all-reduce are taken together as it combines them
    (`Rates.combine`).
    """
    total = Cost()
    combined: dict[tuple[Stage, ...], list[tuple[int, int]]] = {}
    for (stages, nbytes, pieces), times in loads.items():
        copies = 2 * nbytes * rates.copy if pieces else 0.0
        total += Cost(copy=times * (pieces * rates.slice + copies))
        native = len(stages) == 1 and stages[0].algorithm == "native"
        # The combiner leaves alone what is larger than the threshold, and what is not its own.
        if native and nbytes < rates.combine:
            combined.setdefault(stages, []).append((nbytes, times))
        else:
            handed = Cost(latency=rates.array * native)
            total += times * (cost_of(stages, nbytes, sizes, rates) + handed)
    for stages, together in combined.items():
        count = sum(times for _, times in together)
        nbytes = sum(times * each for each, times in together)
        # A combined collective ends at the threshold, or at so many operands.
        calls = max(-(-nbytes // rates.combine), -(-count // OPERANDS))
        total += calls * cost_of(stages, nbytes // calls, sizes, rates)
        total += Cost(latency=count * rates.array)
    return total


def cost_of(stages: Sequence[Stage], nbytes: int, sizes: tuple[int, ...], rates: Rates) -> Cost:
    """Return the cost of summing one array, its copies and its handing over apart.

    `sizes` are replicas along each of the reduction's axes, outer first, islands one after another
    along the outer ones.
    """
    cost, shard = Cost(), float(nbytes)
    for stage in stages:
        group = _group(stage, sizes, rates)
        cost += _stage(stage, shard, stage is stages[-1], rates, group)
        shard /= stage.shards
    return cost


class Group(NamedTuple):
    """Replicas that reduce together, `p` at most of them on each of `k` islands."""

    n: int
    p: int
    k: int


def collective(kind: str, nbytes: int, group: Group, rates: Rates) -> Cost:
    """Return the cost of one collective of a compiled program, alone.

    A reduce-scatter and an all-gather are the halves of an all-reduce without a curve. Of an
    all-to-all each device keeps an n-th; parts for its own island go by its links. Of a permute or
    a broadcast the whole array takes the slowest link between any two of the group.
    """
    n, p, k = group
    match kind:
        case "all-reduce":
            return _native(nbytes, rates, group)
        case "reduce-scatter" | "all-gather":
            whole = nbytes * (n if kind == "all-gather" else 1)
            added = 0.0 if kind == "all-gather" else (n - 1) / n * whole * rates.reduce
            latency = (_latency(rates, group) + rates.call) / 2
            return Cost(latency, whole * _per_byte(rates, group) / 2, added)
        case "all-to-all" | "ragged-all-to-all":
            latency = (_latency(rates, group) + rates.call) / 2
            near, far = (p - 1) * rates.within.per_byte, (n - p) * rates.between.per_byte
            return Cost(latency, nbytes / n * max(near, far))
        case _:
            link = rates.between if k > 1 else rates.within
            return Cost(rates.call + link.step, nbytes * link.per_byte)


def _group(stage: Stage, sizes: tuple[int, ...], rates: Rates) -> Group:
    """Return where the replicas of a stage are, islands one after another in the order of ranks."""
    stride = math.prod(sizes[max(stage.axes) + 1 :])
    p = min(max(rates.per_island // stride, 1), stage.replicas)
    return Group(stage.replicas, p, -(-stage.replicas // p))


def _stage(stage: Stage, nbytes: float, last: bool, rates: Rates, group: Group) -> Cost:
    n = stage.replicas
    added = (n - 1) * nbytes / stage.shards * rates.reduce
    if stage.algorithm == "native":
        if last:
            return _native(nbytes, rates, group)
        # A reduce-scatter and, later, an all-gather. Switches that sum on the way (NVLS) do so in
        # all-reduces alone, so no curve stands for these.
        latency = _latency(rates, group) + rates.call
        return Cost(latency, nbytes * _per_byte(rates, group), added)
    link = rates.between if group.k > 1 else rates.within
    exchanges = steps([stage])
    # The parts of an all-to-all are under way together, and arrive as those of halving do.
    waits = 2 * (n - 1).bit_length() if exchanges == 2 else exchanges
    sent = (stage.shards - 1 + n - 1) * nbytes / stage.shards
    far = sent * _share_between(stage.algorithm, group)
    bandwidth = far * rates.between.per_byte + (sent - far) * rates.within.per_byte
    latency = exchanges * rates.call + waits * link.step
    if not stage.format:
        return Cost(latency, bandwidth, added)
    format = stage.format
    narrow = format.nbytes(format.block) / (4 * format.block)  # what is coded is float32
    return Cost(latency, bandwidth * narrow, added, format.passes * nbytes * rates.copy)


def _share_between(algorithm: str, group: Group) -> float:
    """Return the part of what a device sends in exchanges that goes to other islands.

    In a ring all wait at each step for the devices whose neighbour is on another island.
    """
    n, p, k = group
    if k == 1 or algorithm == "ring":
        return float(k > 1)
    # In pairs, neighbours come first, and what is left for the others is smaller.
    in_pairs = algorithm == "halving_doubling" and n.bit_count() == 1
    return (k - 1 if in_pairs else n - p) / (n - 1)


def _native(nbytes: float, rates: Rates, group: Group) -> Cost:
    """Return the cost of the backend's own all-reduce, from the nearest curve.

    The time of the smallest size is latency, and grows by steps; the rest grows as the bytes that
    the slowest link carries.
    """
    curve = _nearest(rates.native, group)
    if curve is None:
        added = (group.n - 1) / group.n * nbytes * rates.reduce
        return Cost(_latency(rates, group), nbytes * _per_byte(rates, group), added)
    measured = Group(curve.replicas, curve.replicas // curve.islands, curve.islands)
    latency = curve.latency + _latency(rates, group) - _latency(rates, measured)
    rest = curve.seconds(nbytes) - curve.latency
    # Bytes scale by the slopes of the model; where only one of the two has several islands, by the
    # slope that was measured.
    if measured != group:
        alike = (measured.k > 1) == (group.k > 1)
        slope = _per_byte(rates, measured) if alike else curve.per_byte
        rest *= _per_byte(rates, group) / slope if slope else 1.0
    # A curve of a larger world, brought to a small one, must not promise less than a bare call.
    return Cost(max(latency, rates.call), rest)


def _nearest(curves: Sequence[Curve], group: Group) -> Curve | None:
    """Return the curve of the smallest world that is not smaller, else of the largest.

    Between islands a curve within one serves where there is none, if several devices of each take
    part: transports then do the same on more links.
    """
    across = [c for c in curves if c.islands > 1 and (c.replicas > c.islands) == (group.p > 1)]
    inside = [c for c in curves if c.islands == 1]
    if group.k == 1:
        usable, count = inside, group.n
    elif across:
        usable, count = across, group.n
    else:
        usable, count = (inside if group.p > 1 else []), group.p
    return min(usable, key=lambda c: (c.replicas < count, abs(c.replicas - count)), default=None)


def _latency(rates: Rates, group: Group) -> float:
    """Return the seconds of an empty all-reduce: to one and back, or to all, islands first."""
    near = rates.within.steps(group.p) * rates.within.step
    far = rates.between.steps(group.k) * rates.between.step if group.k > 1 else 0.0
    return rates.call + 2 * (near + far)


def _per_byte(rates: Rates, group: Group) -> float:
    """Return the seconds per byte of an all-reduce that keeps the slowest link busy."""
    around = 2 * (group.n - 1) / group.n
    if group.k == 1:
        return around * rates.within.per_byte
    # Between two islands a tree sends one array each way, fewer bytes than a ring (NCCL does so).
    across = (1.0 if group.k == 2 else around) * rates.between.per_byte / group.p
    return max(across, around * rates.within.per_byte * (group.p > 1))
