"""How often the same workers may begin a step that they do not finish."""

from __future__ import annotations

from jaxcoll._elastic.generation import Decision

MOST_ATTEMPTS = 20
"""A step that was late so often in a row, though all workers live and connect, always is."""


class Attempts:
    """The attempts at one step.

    Attributes:
      times: how often in a row the present workers did not finish the present step.
      error: what failed on this worker in the last of them, if anything did.
    """

    def __init__(self) -> None:
        self.times = 0
        self.error: Exception | None = None
        self._failed: Exception | None = None
        self._last: object = None

    def fail(self, error: Exception) -> None:
        """The step failed here, and not because time was up."""
        self._failed = error.with_traceback(None)  # which holds arrays

    def count(self, decision: Decision) -> None:
        """Who goes on from which step was decided."""
        now = decision.step, frozenset(decision.members)
        self.times = self.times + 1 if now == self._last else 1
        self._last = now
        self.error, self._failed = self._failed, None

    @property
    def are_over(self) -> bool:
        """Whether to begin once more is in vain: it failed here twice, or was late too often."""
        return (self.error is not None and self.times > 1) or self.times >= MOST_ATTEMPTS
