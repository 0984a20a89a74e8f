"""What a reduction will take, in seconds: from shapes, a composition of algorithms, and terms.

The formulas are the standard ones (see `algorithms`), with one addition for an all-reduce that
the backend carries out flat over several islands: its bytes cross by the links of all p devices
of an island at once. Sent round a ring, 2(n-1)/n of the array crosses; between two islands only
one array each way, since a tree does as well. NCCL's own model makes the same exception; Gloo has
no such tree.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxcoll._plan import wire_formats
from jaxcoll._plan.algorithms import Stage, steps
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import Pack

HALF_DUPLEX = 1.5
"""How much longer than by their bytes exchanges of our own take on a link between hosts, where both
ends send at once over TCP; measured at 100 Mbit/s and 1 Gbit/s (docs/performance.md)."""

OPERANDS = 256
"""Most arrays that XLA's combiners make one collective of (xla/service/collective_utils.h)."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds, by what they are spent on."""

    latency: float = 0.0  # starting collectives, and waiting for first bytes
    bandwidth: float = 0.0  # bytes on links; for a measured curve all that grows with the size
    reduction: float = 0.0  # adding, where the backend does not do it on the way
    copy: float = 0.0  # into packs and out of them

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.latency + self.bandwidth + self.reduction + self.copy

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: float) -> Cost:
        return Cost(*(part * count for part in vars(self).values()))

    __rmul__ = __mul__


class Load(NamedTuple):
    """Arrays that cost the same: packs of one size that travel alike."""

    stages: tuple[Stage, ...]  # what sums each of them; see `jaxcoll._plan.algorithms`
    nbytes: int  # bytes of one
    # Pieces of leaves that are copied into one and out again; 0: it is a leaf itself
    pieces: int = 0
    times: int = 1  # how many there are


def loads(
    packs: Iterable[Pack], leaves: Sequence[Leaf], composed: Callable[[Pack], tuple[Stage, ...]]
) -> tuple[Load, ...]:
    """The packs of a plan, those that cost the same counted together."""
    found: Counter[tuple[tuple[Stage, ...], int, int]] = Counter()
    for pack in packs:
        pieces = 0 if pack.is_leaf(leaves) else len(pack.segments)
        found[composed(pack), pack.nbytes, pieces] += 1
    return tuple(Load(*alike, count) for alike, count in found.items())


class Prices:
    """Costs in one world; each composition and size is worked out once.

    Args:
      terms: what the world costs.
      sizes: replicas along each of the reduction's axes, outer first, islands one after another
        along the outer ones; replicas beyond those of `terms.key` are on further islands.
    """

    def __init__(self, terms: Terms, sizes: Sequence[int]) -> None:
        self.terms = terms
        self.sizes = tuple(sizes)
        self._known: dict[tuple[Stage, ...], dict[int, Cost]] = {}

    def of(self, stages: tuple[Stage, ...], nbytes: int) -> Cost:
        """The cost of summing one array of `nbytes`, its copies and its handing over apart."""
        return self._priced(self._known.setdefault(stages, {}), stages, nbytes)

    def predict(self, loads: Iterable[Load]) -> Cost:
        """The cost of a whole plan, packs one after another, copies and handing over included.

        Arrays that the compiler sums by its own all-reduce are taken together as it combines
        them (`Terms.combine`).
        """
        terms = self.terms
        latency = bandwidth = reduction = copy = 0.0
        combined: dict[tuple[Stage, ...], list[Load]] = {}
        stages, known = None, {}
        for load in loads:
            copy += load.times * (
                load.pieces * terms.slice + 2 * load.nbytes * terms.copy * (load.pieces > 0)
            )
            # Its combiner leaves alone what is larger than the threshold, and what is not its own.
            if terms.combine and load.nbytes < terms.combine and _is_native(load.stages):
                combined.setdefault(load.stages, []).append(load)
                continue
            if load.stages is not stages:
                stages, known = load.stages, self._known.setdefault(load.stages, {})
            cost = self._priced(known, load.stages, load.nbytes)
            latency += load.times * (cost.latency + terms.array * _is_native(load.stages))
            bandwidth += load.times * cost.bandwidth
            reduction += load.times * cost.reduction
            copy += load.times * cost.copy
        total = Cost(latency, bandwidth, reduction, copy)
        for stages, together in combined.items():
            count = sum(load.times for load in together)
            nbytes = sum(load.times * load.nbytes for load in together)
            # A combined collective ends at the threshold, or at so many operands.
            calls = max(-(-nbytes // terms.combine), -(-count // OPERANDS))
            total += calls * self.of(stages, nbytes // calls) + Cost(latency=count * terms.array)
        return total

    def _priced(self, known: dict[int, Cost], stages: tuple[Stage, ...], nbytes: int) -> Cost:
        cost = known.get(nbytes)
        if cost is None:
            cost, shard = Cost(), float(nbytes)
            for stage in stages:
                last = stage is stages[-1]
                cost += _stage(stage, shard, last, self.terms, _met(stage, self.sizes, self.terms))
                shard /= stage.shards
            known[nbytes] = cost
        return cost


class Met(NamedTuple):
    """Replicas that reduce together, `p` at most of them on each of `k` islands."""

    n: int
    p: int
    k: int


def collective(kind: str, nbytes: int, met: Met, terms: Terms) -> Cost:
    """The cost of one collective of a compiled program, alone.

    A reduce-scatter and an all-gather are the halves of an all-reduce without a curve. Of an
    all-to-all each device keeps an n-th; parts for its own island go by its links. Of a permute or
    a broadcast the whole array takes the slowest link between any two of the group.
    """
    n, p, k = met
    match kind:
        case "all-reduce":
            return _native(nbytes, terms, met)
        case "reduce-scatter" | "all-gather":
            whole = nbytes * (n if kind == "all-gather" else 1)
            added = 0.0 if kind == "all-gather" else (n - 1) / n * whole * terms.reduce
            latency = (_latency(terms, met) + terms.call) / 2
            return Cost(latency, whole * _per_byte(terms, met) / 2, added)
        case "all-to-all" | "ragged-all-to-all":
            latency = (_latency(terms, met) + terms.call) / 2
            near, far = (p - 1) * terms.within.per_byte, (n - p) * terms.between.per_byte
            return Cost(latency, nbytes / n * max(near, far))
        case _:
            link = terms.between if k > 1 else terms.within
            return Cost(terms.call + link.step, nbytes * link.per_byte)


def _is_native(stages: tuple[Stage, ...]) -> bool:
    """Whether it is the backend's own all-reduce, in one collective."""
    return len(stages) == 1 and stages[0].algorithm == "native"


def _met(stage: Stage, sizes: tuple[int, ...], terms: Terms) -> Met:
    """Where the replicas of a stage are, islands one after another in the order of ranks."""
    stride = math.prod(sizes[max(stage.axes) + 1 :])
    p = min(max(terms.key.per_island // stride, 1), stage.replicas)
    return Met(stage.replicas, p, -(-stage.replicas // p))


def _stage(stage: Stage, nbytes: float, last: bool, terms: Terms, met: Met) -> Cost:
    n = stage.replicas
    added = (n - 1) * nbytes / stage.shards * terms.reduce
    if stage.algorithm == "native":
        if last:
            return _native(nbytes, terms, met)
        # A reduce-scatter and, later, an all-gather. Switches that sum on the way (NVLS) do so in
        # all-reduces alone, so no curve stands for these.
        return Cost(_latency(terms, met) + terms.call, nbytes * _per_byte(terms, met), added)
    link = terms.between if met.k > 1 else terms.within
    exchanges = steps([stage])
    # The parts of an all-to-all are under way together, and arrive as those of halving do.
    waits = 2 * (n - 1).bit_length() if exchanges == 2 else exchanges
    sent = (stage.shards - 1 + n - 1) * nbytes / stage.shards
    far = sent * _share_between(stage.algorithm, met)
    slower = HALF_DUPLEX if terms.key.backend == "gloo" and terms.key.hosts > 1 else 1.0
    bandwidth = far * terms.between.per_byte * slower + (sent - far) * terms.within.per_byte
    latency = exchanges * terms.call + waits * link.step
    if not stage.format:
        return Cost(latency, bandwidth, added)
    format = wire_formats.of(stage.format)
    narrow = format.nbytes(format.block) / (4 * format.block)  # what is coded is float32
    return Cost(latency, bandwidth * narrow, added, format.passes * nbytes * terms.copy)


def _share_between(algorithm: str, met: Met) -> float:
    """The part of what a device sends in exchanges that goes to other islands.

    In a ring all wait at each step for the devices whose neighbour is on another island.
    """
    n, p, k = met
    if k == 1 or algorithm == "ring":
        return float(k > 1)
    # In pairs, neighbours come first, and what is left for the others is smaller.
    in_pairs = algorithm == "halving_doubling" and n.bit_count() == 1
    return (k - 1 if in_pairs else n - p) / (n - 1)


def _native(nbytes: float, terms: Terms, met: Met) -> Cost:
    """The backend's own all-reduce: from the nearest curve, brought to this number of replicas.

    What the smallest size took is latency, and grows by steps; the rest grows as the bytes that
    the slowest link carries.
    """
    curve = _nearest(terms.native, met)
    if curve is None:
        added = (met.n - 1) / met.n * nbytes * terms.reduce
        return Cost(_latency(terms, met), nbytes * _per_byte(terms, met), added)
    measured = Met(curve.replicas, curve.replicas // curve.islands, curve.islands)
    latency = curve.latency + _latency(terms, met) - _latency(terms, measured)
    rest = curve.seconds(nbytes) - curve.latency
    # Bytes scale by the slopes of the model; where only one of the two has several islands,
    # by the slope that was measured.
    if measured != met:
        alike = (measured.k > 1) == (met.k > 1)
        slope = _per_byte(terms, measured) if alike else curve.per_byte
        rest *= _per_byte(terms, met) / slope if slope else 1.0
    # A curve of a larger world, brought to a small one, must not promise less than a bare call.
    return Cost(max(latency, terms.call), rest)


def _nearest(curves: Sequence[Curve], met: Met) -> Curve | None:
    """The curve of the smallest world that is not smaller, else of the largest.

    Between islands a curve within one serves where there is none, if several devices of each take
    part: transports then do the same on more links.
    """
    across = [c for c in curves if c.islands > 1 and (c.replicas > c.islands) == (met.p > 1)]
    inside = [c for c in curves if c.islands == 1]
    if met.k == 1:
        found, count = inside, met.n
    elif across:
        found, count = across, met.n
    else:
        found, count = (inside if met.p > 1 else []), met.p
    return min(found, key=lambda c: (c.replicas < count, abs(c.replicas - count)), default=None)


def _latency(terms: Terms, met: Met) -> float:
    """Seconds of an empty all-reduce: to one and back, or to all, first within islands."""
    near = terms.within.steps(met.p) * terms.within.step
    far = terms.between.steps(met.k) * terms.between.step if met.k > 1 else 0.0
    return terms.call + 2 * (near + far)


def _per_byte(terms: Terms, met: Met) -> float:
    """Seconds per byte of an all-reduce that keeps the slowest link busy."""
    around = 2 * (met.n - 1) / met.n
    if met.k == 1:
        return around * terms.within.per_byte
    # Between two islands a tree sends one array each way, fewer bytes than a ring (NCCL does so).
    tree = met.k == 2 and terms.key.backend != "gloo"
    across = (1.0 if tree else around) * terms.between.per_byte / met.p
    return max(across, around * terms.within.per_byte * (met.p > 1))
