"""The clock: interleaved rounds, medians, and bootstrap intervals of ratios."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median of the paired ratios, with the 95 % bootstrap interval of that median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def seconds(call: Callable[[], Any]) -> float:
    """Wall seconds of one call, which must wait for its own result."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> Iterator[dict[str, float]]:
    """Time every call once a round, in an order that is reversed every other round.

    Args:
      calls: what to measure, by name; each waits for its own result.
      rounds: how many rounds.

    Yields:
      Seconds by name, one dictionary a round.
    """
    names = list(calls)
    for k in range(rounds):
        order = names if k % 2 == 0 else names[::-1]
        yield {name: seconds(calls[name]) for name in order}


def ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """The ratio of two calls that were timed in the same rounds.

    Args:
      numerator: seconds, one a round.
      denominator: seconds, of the same rounds.
      seed: for the resampling.

    Returns:
      The median over rounds and its interval (2,000 resamples).

    Examples:
      >>> str(ratio([2.0, 2.0, 4.0], [1.0, 2.0, 2.0]))
      '2 [1, 2]'
    """
    quotients = np.asarray(numerator, float) / np.asarray(denominator, float)
    picks = np.random.default_rng(seed).integers(0, len(quotients), (2000, len(quotients)))
    low, high = np.percentile(np.median(quotients[picks], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(quotients)), float(low), float(high))
