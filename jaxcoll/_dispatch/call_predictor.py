"""Predict the next program, so that processes only need to agree on surprises.

Every process predicts for itself and asks nobody. Processes that made the same calls predict the
same, so that either all of them stop to agree or none does; and a process that is about to do what
it never did in this place stops.
"""

from __future__ import annotations

from collections import deque

CONTEXTS = (16, 8, 4, 2, 1, 0)
"""Lengths of the contexts, in runs before the present one, longest first."""

FREE_CHECKS = 64
"""How often processes agree, at most, upon known programs in a new order..."""

CALLS_PER_CHECK = 100
"""... and once more for so many calls: an irregular order costs a hundredth."""

MAX_PLACES = 1 << 12
"""Places whose successors are remembered."""

_Run = tuple[str, int]
_Place = tuple[tuple[_Run | str, ...], int]


class CallPredictor:
    """The order in which one process calls programs, by their marks.

    Law: once a loop of up to 16 runs has repeated often enough, its calls need no agreement; any
    departure triggers agreement, on the process that departs or on those that do not.

    A run is one program called several times in a row. Its successor is remembered by the length of
    the run and by the runs before it. The expected one is what followed in the longest context that
    occurred before, as in prediction by partial matching (J. G. Cleary, I. H. Witten, "Data
    Compression Using Adaptive Coding and Partial String Matching", IEEE Transactions on
    Communications 32, 1984).
    """

    def __init__(self) -> None:
        self._pairs: set[tuple[str, str]] = set()
        self._runs: deque[_Run] = deque(maxlen=max(CONTEXTS))
        self._contexts: list[tuple[_Run | str, ...]] = []
        self._followed: dict[_Place, set[str]] = {}
        self._mark, self._length = "", 0
        self._calls = self._checks = 0

    def is_unexpected(self, mark: str) -> bool:
        """Whether processes have to agree that `mark` is called next. Cost: half a microsecond."""
        if (self._mark, mark) not in self._pairs:
            return True
        if mark == self._mark and ((mark,), self._length) not in self._followed:
            return False  # a run goes on that never ended here
        return self._checks < FREE_CHECKS + self._calls // CALLS_PER_CHECK and not self._expects(
            mark
        )

    def follow(self, mark: str, unexpected: bool) -> None:
        """Note that `mark` is called, after `is_unexpected` returned this."""
        self._calls += 1
        self._checks += unexpected
        if mark == self._mark:
            if ((mark,), self._length) in self._followed:
                self._note(mark)
            self._length += 1
            return
        if self._mark:
            self._pairs.add((self._mark, mark))
            self._note(mark)
            self._runs.append((self._mark, self._length))
        self._pairs.add((mark, mark))
        self._mark, self._length = mark, 1
        runs = tuple(self._runs)
        # Whole tuples, never their hashes: those differ between processes.
        self._contexts = [(*runs[len(runs) - k :], mark) for k in CONTEXTS if k <= len(runs)]

    def interrupt(self) -> None:
        """Forget the place in the order, because processes disagree: the next is unexpected."""
        self._mark, self._length = "", 0
        self._runs.clear()

    def _expects(self, mark: str) -> bool:
        for context in self._contexts:
            known = self._followed.get((context, self._length))
            if known is not None:
                return mark in known
        return mark == self._mark

    def _note(self, mark: str) -> None:
        for context in self._contexts:
            self._followed.setdefault((context, self._length), set()).add(mark)
        while len(self._followed) > MAX_PLACES:
            del self._followed[next(iter(self._followed))]
