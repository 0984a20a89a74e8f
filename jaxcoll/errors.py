"""The errors a user may want to catch by name."""

import collections.abc as _abc


class _RanksError(Exception):
    """An error that names processes of a job."""

    def __init__(self, message: str, *, ranks: _abc.Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class AlreadyReducedError(ValueError):
    """A leaf handed to a reduction is already the same on every replica.

    Reducing it again would multiply a SUM by the number of replicas, silently. The message
    names the leaf, says what probably happened, and the two arguments that settle it.
    """


class DeadlineExceededError(_RanksError, TimeoutError):
    """A host-level call or a wrapped step took longer than its `timeout_seconds`.

    Attributes:
      ranks: the processes that did not arrive, as far as that is known.
    """


class PeerLostError(_RanksError, ConnectionError):
    """A process that took part in a call has died, or was cut off from the others.

    Attributes:
      ranks: the processes that are lost.
    """


class LaunchError(_RanksError, RuntimeError):
    """A process of `jc.launch` raised an exception or died, or the time was up.

    The message has its rank, and its traceback or last lines.

    Attributes:
      ranks: the processes that failed first, or that were late.
    """


class ProgramMismatchError(RuntimeError):
    """Processes that should run the same program are about to run, or run, different ones.

    Every process that takes part raises it. The message shows both sides of the first
    difference.
    """


class ReplicaDivergenceError(RuntimeError):
    """Replicas that should hold the same hold different values.

    Attributes:
      divergent: of each leaf's path the replicas in groups that agree, largest first.
    """

    def __init__(
        self, message: str, *, divergent: _abc.Mapping[str, tuple[tuple[str, ...], ...]]
    ) -> None:
        super().__init__(message)
        self.divergent = divergent


class RepeatedSumWarning(UserWarning):
    """A sum over replicas of what a reduction over them has made the same everywhere.

    It is as many times too large as there are replicas, and nearly always a mistake.
    """


class SameRowsWarning(UserWarning):
    """All processes passed the same rows of a batch, as if each of them held all of it.

    Between processes an array of the host is this process's share. The message names the leaf.
    """
