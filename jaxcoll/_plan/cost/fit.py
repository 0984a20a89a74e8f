"""Cost terms from the measured seconds of a few programs: which programs, and the arithmetic."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from jaxcoll._plan.algorithms import exchange, stages
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.model import Load, Prices
from jaxcoll._plan.cost.terms import Link, Terms

KiB, MiB = 1 << 10, 1 << 20

ONE = 16 * MiB
"""Largest array that stands for leaves which the compiler combines."""

SIZES = (KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB)
EXCHANGED = (KiB, MiB, 16 * MiB)
"""Bytes of one array that the backend sums, and of one that an exchange of our own sums."""

_ARRAYS = 16  # of the smallest size are handed over in one program
_PACKS = (8, 2 * MiB), (256, KiB)  # arrays and bytes of each, copied into one of these sizes


@dataclasses.dataclass(frozen=True)
class Probe:
    """One program to measure: a sum of `count` arrays of `nbytes` each."""

    algorithm: str  # a canonical name
    count: int  # arrays
    nbytes: int  # bytes of each, on one replica
    packed: bool = False  # whether they are copied into one

    def load(self, sizes: tuple[int, ...]) -> Load:
        """It as the cost model has it, over axes of these sizes."""
        how = stages(self.algorithm, 0, sizes)
        if self.packed:
            return Load(how, self.count * self.nbytes, pieces=self.count)
        return Load(how, self.nbytes, times=self.count)


def probes_of(axes: int, terms: Terms) -> tuple[Probe, ...]:
    """All programs to measure, for a world of so many axes; exchanges are over one."""
    own = exchange(terms.key.replicas)
    return (
        *(_whole(size, terms.combine) for size in SIZES),
        Probe("native", _ARRAYS, SIZES[0]),
        *(Probe("native", count, size, packed=True) for count, size in _PACKS),
        *(Probe(own, 1, size) for size in EXCHANGED if axes == 1),
    )


def _whole(nbytes: int, combine: int) -> Probe:
    """One array; or, of so many bytes as no leaf has where leaves are combined, a few.

    Malloc gives back every array over 32 MiB, unless it is set otherwise: one such array costs
    more than all the leaves that are combined to its size.
    """
    count = max(1, nbytes // ONE) if nbytes < combine else 1
    return Probe("native", count, nbytes // count)


def fitted(usual: Terms, sizes: tuple[int, ...], seconds: Mapping[Probe, float]) -> Terms:
    """The terms that explain the measured seconds of `probes_of`, in place of the `usual` ones.

    An exchange gives a latency and a slope, and so no more than two numbers: `call` and the link's
    `step` keep the proportion that they had, and so do its `per_byte` and `reduce`. What was not
    measured (the other link, `combine`, curves of other numbers of replicas) stays as it was.
    """
    key = usual.key
    islands = key.islands
    many = Probe("native", _ARRAYS, SIZES[0])
    whole = {
        p.count * p.nbytes: (p.count, t)
        for p, t in seconds.items()
        if p.algorithm == "native" and not p.packed and p != many
    }
    alone = {size: t for size, (_, t) in whole.items()}
    curve = Curve(tuple(sorted(alone.items())), key.replicas, islands)
    others = (c for c in usual.native if (c.replicas, c.islands) != (key.replicas, islands))
    array = _array(many, seconds[many], curve, usual.combine)
    if usual.combine:  # there one array has cost `array` as well
        points = ((size, max(t - k * array, t / 2)) for size, (k, t) in sorted(whole.items()))
        curve = dataclasses.replace(curve, points=tuple(points))
    copy, piece = _copies(seconds, alone)
    found = dataclasses.replace(usual, native=(curve, *others), array=array, copy=copy, slice=piece)
    latency, slope = _exchange(usual, sizes, seconds)
    link = "between" if islands > 1 else "within"
    before: Link = getattr(usual, link)
    return dataclasses.replace(
        found,
        call=usual.call * latency,
        reduce=usual.reduce * slope,
        **{link: Link(before.step * latency, before.per_byte * slope, before.torus)},
    )


def _array(many: Probe, t: float, curve: Curve, combine: int) -> float:
    """Seconds of one more array in the same program, beyond what the curve says of it."""
    if many.count * many.nbytes < combine:
        return max(0.0, (t - curve.seconds(many.count * many.nbytes)) / (many.count - 1))
    return max(0.0, (t - curve.latency) / (many.count - 1) - curve.latency)


def _copies(seconds: Mapping[Probe, float], alone: Mapping[int, float]) -> tuple[float, float]:
    """Seconds per byte and per piece: what two packs took longer than one array of their size."""
    large, small = (Probe("native", count, size, packed=True) for count, size in _PACKS)
    a, b = (max(0.0, seconds[p] - alone[p.count * p.nbytes]) for p in (large, small))
    ma, mb = (2 * p.count * p.nbytes for p in (large, small))
    # Two packs give two equations: time beyond one array = bytes × per byte + pieces × per piece.
    determinant = large.count * mb - small.count * ma
    piece, copy = (a * mb - b * ma) / determinant, (large.count * b - small.count * a) / determinant
    # Noise can make one of the two negative; then the other explains the pack that shows it best.
    if piece < 0:
        return a / ma, 0.0
    return (copy, piece) if copy >= 0 else (0.0, b / small.count)


def _exchange(
    usual: Terms, sizes: tuple[int, ...], seconds: Mapping[Probe, float]
) -> tuple[float, float]:
    """Latency and slope of the exchange, in those of the preset; its slope is between sizes."""
    measured = sorted((p.nbytes, p) for p in seconds if p.algorithm != "native")
    if not measured:
        return 1.0, 1.0
    prices = Prices(usual, sizes)
    usually = {p: prices.predict([p.load(sizes)]).seconds for _, p in measured}
    (_, least), *more = measured
    slopes = [
        (seconds[p] - seconds[least]) / (usually[p] - usually[least])
        for _, p in more
        if seconds[p] > seconds[least]
    ]
    return seconds[least] / usually[least], statistics.geometric_mean(slopes) if slopes else 1.0
