"""Errors and warnings that a program may want to catch by name."""

import collections.abc as _abc


class _RanksError(Exception):
    """An error that names processes of a job."""

    def __init__(self, message: str, *, ranks: _abc.Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class AlreadyReducedError(ValueError):
    """A leaf passed to a reduction is already the same on every replica.

    Reducing it again would silently multiply a SUM by the number of replicas. The message names
    the leaf, the probable cause, and the two values of `invariant` that resolve it.
    """


class DeadlineExceededError(_RanksError, TimeoutError):
    """A host-level call or a wrapped step took longer than its `timeout_seconds`.

    Attributes:
      ranks: processes that are known not to have arrived.
    """


class PeerLostError(_RanksError, ConnectionError):
    """A process that took part in a call died or lost its connection to the others.

    Attributes:
      ranks: the lost processes.
    """


class LaunchError(_RanksError, RuntimeError):
    """A process of `jc.launch` raised an exception, died, or exceeded the timeout.

    The message has the process's rank and its traceback or last lines of output.

    Attributes:
      ranks: the processes that failed first, or that did not finish in time.
    """


class ProgramMismatchError(RuntimeError):
    """Processes that should run the same program run, or are about to run, different programs.

    Every participating process raises it. The message shows both sides of the first difference.
    """


class ReplicaDivergenceError(RuntimeError):
    """Replicas that should hold the same values hold different ones.

    Attributes:
      divergent: for each divergent leaf's path, groups of replicas that agree, largest first.
    """

    def __init__(
        self, message: str, *, divergent: _abc.Mapping[str, tuple[tuple[str, ...], ...]]
    ) -> None:
        super().__init__(message)
        self.divergent = divergent


class RepeatedSumWarning(UserWarning):
    """A sum over replicas of a value that an earlier reduction made the same on all of them.

    The sum is the value times the number of replicas, which is nearly always a mistake.
    """


class SameRowsWarning(UserWarning):
    """All processes passed the same rows of a batch, as if each held the whole batch.

    In a job of several processes, a host array is this process's share. The message names the leaf.
    Arrays that repeat one number are not compared, because they may be equal by chance.
    """
