"""How often the same workers may begin one step without finishing it."""

from __future__ import annotations

from jaxcoll._elastic.generation import Generation

MOST_ATTEMPTS = 20
"""A step that was late so often in a row, though all workers live and connect, always will be."""


class Attempts:
    """The attempts at one step.

    Attributes:
      times: how often in a row the present workers began this step.
      error: what failed on this worker in the last attempt, if anything did.
    """

    def __init__(self) -> None:
        self.times = 0
        self.error: Exception | None = None
        self._failed: Exception | None = None
        self._last: object = None

    def fail(self, error: Exception) -> None:
        """Note that the step failed here, and not because a deadline passed."""
        self._failed = error.with_traceback(None)  # a traceback would keep the step's arrays

    def count(self, generation: Generation) -> None:
        """Note that this generation begins the next attempt."""
        now = generation.step, frozenset(generation.members)
        self.times = self.times + 1 if now == self._last else 1
        self._last = now
        self.error, self._failed = self._failed, None

    @property
    def are_over(self) -> bool:
        """Whether another attempt is pointless: it failed here twice, or was late too often."""
        return (self.error is not None and self.times > 1) or self.times >= MOST_ATTEMPTS
