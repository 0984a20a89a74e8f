"""Predicted seconds of a reduction, from shapes, a composition of algorithms, and rates.

The formulas are the standard ones (see `_plan/algorithms.py`), with one addition for a backend's
own all-reduce over several islands: its bytes cross the links of all p devices of an island at
once. In a ring, 2(n-1)/n of the array crosses; between two islands only one array each way, because
there a tree does as well. NCCL's own model makes the same exception.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxcoll._plan.algorithms import Stage, steps
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._report.cost.rates import Curve, Rates, find_rates
from jaxcoll._report.shown_plan import Cost, Plan

OPERANDS = 256
"""Most arrays that XLA combines into one collective (xla/service/collective_utils.h)."""


Load = tuple[tuple[Stage, ...], int, int]
"""Stages that sum an array, its bytes, and the number of pieces of leaves copied into it and out of
it; 0: it is a leaf, and needs no copy."""


def predict(plan: CollectivePlan) -> Plan:
    """Add predicted seconds to a plan, packs running one after another."""
    shown, rates = Plan.of(plan), find_rates(plan.world)
    if rates is None:
        return shown
    rates = dataclasses.replace(rates, combine=0) if plan.overlap else rates
    loads = Counter[Load](
        (plan.stages(pack), pack.nbytes, 0 if pack.is_leaf(plan.leaves) else len(pack.segments))
        for pack in plan.packs
    )
    cost = price_loads(loads, plan.world.sizes, rates)
    if plan.collective != "all_reduce":  # half of the steps and bytes; only one half adds
        adds = plan.collective == "reduce_scatter"
        halves = (cost.latency / 2, cost.bandwidth / 2, cost.reduction * adds, cost.copy / 2)
        cost = Cost(*halves)
    return dataclasses.replace(shown, predicted=dataclasses.replace(cost, source=rates.source))


def price_loads(loads: Mapping[Load, int], sizes: tuple[int, ...], rates: Rates) -> Cost:
    """Price `loads`, each as often as its count, with copies and `Rates.array`.

    Arrays summed by the compiler's own all-reduce are combined as the compiler combines them
    (`Rates.combine`).
    """
    total = Cost()
    combined: dict[tuple[Stage, ...], list[tuple[int, int]]] = {}
    for (stages, nbytes, pieces), times in loads.items():
        copies = 2 * nbytes * rates.copy if pieces else 0.0
        total += Cost(copy=times * (pieces * rates.slice + copies))
        native = len(stages) == 1 and stages[0].algorithm == "native"
        # The compiler combines neither arrays above the threshold nor jaxcoll's own exchanges.
        if native and nbytes < rates.combine:
            combined.setdefault(stages, []).append((nbytes, times))
        else:
            hand_over = Cost(latency=rates.array * native)
            total += times * (price_array(stages, nbytes, sizes, rates) + hand_over)
    for stages, arrays in combined.items():
        count = sum(times for _, times in arrays)
        nbytes = sum(times * nbytes_of_one for nbytes_of_one, times in arrays)
        # A combined collective is full at the threshold, or at the limit of operands.
        calls = max(-(-nbytes // rates.combine), -(-count // OPERANDS))
        total += calls * price_array(stages, nbytes // calls, sizes, rates)
        total += Cost(latency=count * rates.array)
    return total


def price_array(stages: Sequence[Stage], nbytes: int, sizes: tuple[int, ...], rates: Rates) -> Cost:
    """Price the sum of one array, without copies and `Rates.array`.

    `sizes` are the replicas along each axis of the reduction, outer first; islands follow one
    another along the outer axes.
    """
    cost, shard = Cost(), float(nbytes)
    for stage in stages:
        group = _group(stage, sizes, rates)
        cost += _price_stage(stage, shard, stage is stages[-1], rates, group)
        shard /= stage.shards
    return cost


class Group(NamedTuple):
    """A group of `n` replicas that reduce together, at most `p` on each of `k` islands."""

    n: int
    p: int
    k: int


def price_collective(kind: str, nbytes: int, group: Group, rates: Rates) -> Cost:
    """Price a single collective of a compiled program.

    A reduce-scatter or an all-gather costs half of an all-reduce without a curve. In an all-to-all
    each device keeps an n-th, and sends parts for its own island over the links within. In a
    permute or a broadcast the whole array crosses the slowest link between any two of the group.
    """
    n, p, k = group
    match kind:
        case "all-reduce":
            return _price_native(nbytes, rates, group)
        case "reduce-scatter" | "all-gather":
            whole = nbytes * (n if kind == "all-gather" else 1)
            # Half of the way of an all-reduce, there but not back, and a whole call.
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
    """Spread the replicas of a stage over islands, which have consecutive ranks."""
    # Neighbours along an axis are as many ranks apart as the axes inside it have devices.
    stride = math.prod(sizes[max(stage.axes) + 1 :])
    p = min(max(rates.per_island // stride, 1), stage.replicas)
    return Group(stage.replicas, p, -(-stage.replicas // p))


def _price_stage(stage: Stage, nbytes: float, last: bool, rates: Rates, group: Group) -> Cost:
    n = stage.replicas
    added = (n - 1) * nbytes / stage.shards * rates.reduce
    if stage.algorithm == "native":
        if last:
            return _price_native(nbytes, rates, group)
        # A reduce-scatter and, later, an all-gather. Switches that sum on the way (NVLS) do so only
        # in all-reduces, so no measured curve applies here.
        latency = _latency(rates, group) + rates.call
        return Cost(latency, nbytes * _per_byte(rates, group), added)
    link = rates.between if group.k > 1 else rates.within
    exchanges = steps([stage], in_halves=not last)
    # The parts of an all-to-all travel at once; their latency is that of halving and doubling.
    waits = 2 * (n - 1).bit_length() if exchanges == 2 else exchanges
    # To each other owner its shard; then, as an owner, the sum of the own shard to all others.
    sent = (stage.shards - 1 + n - 1) * nbytes / stage.shards
    far = sent * _share_between(stage.algorithm, group)
    bandwidth = far * rates.between.per_byte + (sent - far) * rates.within.per_byte
    latency = exchanges * rates.call + waits * link.step
    if not stage.format:
        return Cost(latency, bandwidth, added)
    format = stage.format
    ratio = format.nbytes(format.block) / (4 * format.block)  # of codes to the float32 they code
    return Cost(latency, bandwidth * ratio, added, format.passes * nbytes * rates.copy)


def _share_between(algorithm: str, group: Group) -> float:
    """Compute the fraction of a device's sent bytes that goes to other islands in exchanges.

    In a ring all devices wait at each step for those whose neighbour is on another island.
    """
    n, p, k = group
    if k == 1 or algorithm == "ring":
        return float(k > 1)
    # Halving in pairs begins with neighbours, and less is left to send to other islands.
    in_pairs = algorithm == "halving_doubling" and n.bit_count() == 1
    return (k - 1 if in_pairs else n - p) / (n - 1)


def _price_native(nbytes: float, rates: Rates, group: Group) -> Cost:
    """Price the backend's own all-reduce, from the nearest curve.

    The time of the smallest size is latency, and scales with the steps; the rest scales with the
    bytes on the slowest link.
    """
    curve = _nearest(rates.native, group)
    if curve is None:
        added = (group.n - 1) / group.n * nbytes * rates.reduce
        return Cost(_latency(rates, group), nbytes * _per_byte(rates, group), added)
    measured = Group(curve.replicas, curve.replicas // curve.islands, curve.islands)
    # What was measured, and what the model says that this group's steps take longer.
    latency = curve.latency + _latency(rates, group) - _latency(rates, measured)
    rest = curve.seconds(nbytes) - curve.latency
    # Bytes scale by the slopes of the model; if only one of the two groups has several islands, by
    # the measured slope.
    if measured != group:
        alike = (measured.k > 1) == (group.k > 1)
        slope = _per_byte(rates, measured) if alike else curve.per_byte
        rest *= _per_byte(rates, group) / slope if slope else 1.0
    # A curve scaled down from a larger world must not promise less than an empty call.
    return Cost(max(latency, rates.call), rest)


def _nearest(curves: Sequence[Curve], group: Group) -> Curve | None:
    """Find the curve of the smallest world that is at least as large, else of the largest.

    Without a curve between islands, one within an island serves, if several devices of each island
    take part: transports then do the same on more links.
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
    """Add up the seconds of an empty all-reduce: there and back, within and between islands."""
    near = rates.within.steps(group.p) * rates.within.step
    far = rates.between.steps(group.k) * rates.between.step if group.k > 1 else 0.0
    return rates.call + 2 * (near + far)


def _per_byte(rates: Rates, group: Group) -> float:
    """Compute the seconds per byte of an all-reduce that keeps the slowest link busy."""
    around = 2 * (group.n - 1) / group.n
    if group.k == 1:
        return around * rates.within.per_byte
    # Between two islands a tree sends one array each way, fewer bytes than a ring (NCCL does so).
    across = (1.0 if group.k == 2 else around) * rates.between.per_byte / group.p
    return max(across, around * rates.within.per_byte * (group.p > 1))
