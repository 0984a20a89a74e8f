"""What is expected to follow, so that processes agree beforehand upon what is not.

Every process keeps its own account and asks nobody. Those that made the same calls have the same
account, so that either all of them stop to agree or none does; and where one of them is about to
do what it never did in this place, it is the one that stops.
"""

from __future__ import annotations

from collections import deque

CONTEXTS = (16, 8, 4, 2, 1, 0)
"""Of how many runs before the present one what follows is remembered, longest first."""

ALLOWED = 64
"""How often processes agree, at most, upon known programs in a new order..."""

EVERY = 100
"""... and once more for so many calls: where the order is irregular it costs a hundredth."""

MOST = 1 << 12
"""Places of which what followed is remembered."""

_Run = tuple[str, int]
_Place = tuple[tuple[_Run | str, ...], int]


class Order:
    """The order in which one process calls programs, by their marks.

    Law: after a loop of at most 16 runs was gone round often enough, nothing in it is asked about
    any more, and whatever departs from it is, by who departs or by who does not.

    A run is one program called several times on end. What followed is remembered by how long the
    run was and by the runs before it. What is expected is what followed in the longest context that
    occurred before, as in prediction by partial matching (J. G. Cleary, I. H. Witten, "Data
    Compression Using Adaptive Coding and Partial String Matching", IEEE Transactions on
    Communications 32, 1984).

    Examples:
      >>> order = Order()
      >>> def call(mark):
      ...     asked = order.asks(mark)
      ...     order.follow(mark, asked)
      ...     return asked
      >>> [call(mark) for mark in "ttte" * 4].count(True) < 9
      True
      >>> [call(mark) for mark in "ttte"]
      [False, False, False, False]
      >>> [call(mark) for mark in "tte"]
      [False, False, True]
    """

    def __init__(self) -> None:
        self._pairs: set[tuple[str, str]] = set()
        self._runs: deque[_Run] = deque(maxlen=max(CONTEXTS))
        self._contexts: list[tuple[_Run | str, ...]] = []
        self._followed: dict[_Place, set[str]] = {}
        self._mark, self._length = "", 0
        self._calls = self._asked = 0

    def asks(self, mark: str) -> bool:
        """Whether processes have to agree that `mark` is called next. Cost: half a microsecond."""
        if (self._mark, mark) not in self._pairs:
            return True
        if mark == self._mark and ((mark,), self._length) not in self._followed:
            return False  # a run goes on that never ended here
        return self._asked < ALLOWED + self._calls // EVERY and not self._expects(mark)

    def follow(self, mark: str, asked: bool) -> None:
        """Note that `mark` is called, after `asks` was answered so."""
        self._calls += 1
        self._asked += asked
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
        self._contexts = [(*runs[len(runs) - k :], mark) for k in CONTEXTS if k <= len(runs)]

    def interrupt(self) -> None:
        """Forget where this is in the order, because processes do not agree: the next one asks."""
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
        while len(self._followed) > MOST:
            del self._followed[next(iter(self._followed))]
