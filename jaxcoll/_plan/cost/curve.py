"""Seconds of an all-reduce against its bytes, read between the sizes that were measured."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import statistics

from jaxcoll._plan.checks import is_number
from jaxcoll._show.units import counted


@dataclasses.dataclass(frozen=True)
class Curve:
    """Measured seconds of the backend's own all-reduce of one array, at a few sizes.

    Two terms, a latency and a bandwidth, miss published curves by up to a third: transports
    change protocol and algorithm with the size. So the measured points stand. A transport that
    takes the best of several protocols, each a latency and a bandwidth, has a curve that is
    concave in bytes, and one that is flat at first and proportional at last is convex in
    logarithms. Between two points it then lies above the chord in bytes and below the chord in
    logarithms; what is read is the geometric mean of the two. Above the largest size the last
    slope goes on; below the smallest only latency is left.

    Raises:
      ValueError: fewer than two points; bytes or seconds that are not positive; bytes that do
        not rise; numbers of replicas or islands that cannot be.

    Examples:
      >>> curve = Curve(((1 << 20, 1e-3), (1 << 22, 3e-3)), replicas=8)
      >>> [round(1e3 * curve.seconds(nbytes), 2) for nbytes in (0, 1 << 21, 1 << 22, 1 << 23)]
      [1.0, 1.7, 3.0, 5.67]
    """

    # Pairs of bytes and seconds; bytes rise. Seconds that fall are noise, and read as the geometric
    # mean of the fewest neighbours that then rise (isotonic regression by pooling: Ayer et al.,
    # 1955)
    points: tuple[tuple[int, float], ...]
    replicas: int  # devices it was measured over
    islands: int = 1  # hosts (TPU: slices; CPU: processes) that those belonged to

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if len(sizes) < 2:
            raise ValueError(f"a curve needs two measured sizes or more; got {len(sizes)}.")
        if not all(is_number(x) and x > 0 for point in self.points for x in point):
            raise ValueError(
                "the points of a curve must be pairs of positive bytes and positive seconds; got "
                f"{self.points!r}."
            )
        if any(b <= a for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"the sizes of a curve must rise from point to point; got {sizes}.")
        if self.replicas < 2 or not 1 <= self.islands <= self.replicas:
            raise ValueError(
                "a curve is measured over two replicas or more, on at most as many islands; got "
                f"{counted(self.replicas, 'replica')} on {counted(self.islands, 'island')}."
            )

    @property
    def latency(self) -> float:
        """Seconds of the smallest size, which stand for all smaller ones."""
        return self._rising[1][0]

    @functools.cached_property
    def per_byte(self) -> float:
        """Seconds per byte beyond the largest size: the slope between the two largest."""
        sizes, seconds = self._rising
        # Two equal times pool to a flat end, and then time has to grow with the size all the same.
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return slope or seconds[-1] / sizes[-1]

    def seconds(self, nbytes: float) -> float:
        """Seconds for an array of `nbytes`. Law: never less for more bytes."""
        return math.prod(self.chords(nbytes)) ** 0.5

    def chords(self, nbytes: float) -> tuple[float, float]:
        """Seconds by the two chords at `nbytes`, lower first; measure next where they part most."""
        sizes, seconds = self._rising
        if nbytes <= sizes[0]:
            return seconds[0], seconds[0]
        if nbytes >= sizes[-1]:
            beyond = seconds[-1] + (nbytes - sizes[-1]) * self.per_byte
            return beyond, beyond
        k = bisect.bisect_right(sizes, nbytes)
        size, t = sizes[k - 1], seconds[k - 1]
        u = (nbytes - size) / (sizes[k] - size)
        v = math.log(nbytes / size) / math.log(sizes[k] / size)
        by_bytes, by_logarithms = t + u * (seconds[k] - t), t * (seconds[k] / t) ** v
        return min(by_bytes, by_logarithms), max(by_bytes, by_logarithms)

    @functools.cached_property
    def _rising(self) -> tuple[list[int], list[float]]:
        pools: list[list[float]] = []
        for _, t in self.points:
            pools.append([t])
            while len(pools) > 1 and _middle(pools[-2]) > _middle(pools[-1]):
                pools[-2:] = [pools[-2] + pools[-1]]
        return ([size for size, _ in self.points], [_middle(pool) for pool in pools for _ in pool])


def _middle(seconds: list[float]) -> float:
    return seconds[0] if len(seconds) == 1 else statistics.geometric_mean(seconds)
