"""The errors a user may want to catch by name."""

from __future__ import annotations

from collections.abc import Mapping


class AlreadyReducedError(ValueError):
    """A leaf handed to a reduction is already the same on every replica.

    Reducing it again would multiply a SUM by the number of replicas, silently. The message
    names the leaf, says what probably happened, and the two arguments that settle it.
    """


class DeadlineExceededError(TimeoutError):
    """A host-level call or a wrapped step took longer than its `timeout_seconds`."""


class ReplicaDivergenceError(RuntimeError):
    """Replicas that should hold the same hold different values.

    Attributes:
      divergent: of each leaf's path the replicas in groups that agree, largest first.
    """

    def __init__(
        self, message: str, *, divergent: Mapping[str, tuple[tuple[str, ...], ...]]
    ) -> None:
        super().__init__(message)
        self.divergent = divergent


class ReductionInLoopWarning(UserWarning):
    """A reduction stands in a loop that only adds up what it returns.

    The sum of the reductions is the reduction of the sum, so once after the loop is enough: what
    is sent is as many times less as the loop turns. The message names the reductions, the lines
    that ask for them, and what to do.
    """
