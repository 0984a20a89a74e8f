"""Interleaved rounds, medians, and bootstrap intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median over rounds, with its 95 % bootstrap interval (2,000 resamples).

    Examples:
      >>> str(estimate([2.0, 1.0, 2.0]))
      '2 [1, 2]'
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interleaved(calls: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Make every call once per round, in turned order every other one; yields results by name."""
    names = list(calls)
    for k in range(rounds):
        # Reversed, so that a drift of the machine within rounds cancels over two of them.
        order = names if k % 2 == 0 else names[::-1]
        yield {name: calls[name]() for name in order}


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median of at least one value, one per round; `seed` is for the resampling."""
    found = np.asarray(values, float)
    # The median of rounds and not their mean: a round that was disturbed is off by any factor.
    picks = np.random.default_rng(seed).integers(0, len(found), (2000, len(found)))
    low, high = np.percentile(np.median(found[picks], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(found)), float(low), float(high))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate | None:
    """The ratio of two things that were measured in the same rounds, each with its own quotient.

    None where a denominator is 0, as CPU seconds are that the clock was too coarse for.

    Examples:
      >>> str(ratio([2.0, 2.0, 4.0], [1.0, 2.0, 2.0]))
      '2 [1, 2]'
    """
    if not all(denominator):
        return None
    return estimate([a / b for a, b in zip(numerator, denominator, strict=True)])
