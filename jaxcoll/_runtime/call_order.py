"""The order in which a process calls programs, and the program that it expects next."""

from __future__ import annotations

RECENT = 1 << 13
"""Least number of calls that are remembered."""

CONTEXTS = (16, 8, 4, 2, 1)
"""Lengths of recent call sequences to search for among earlier calls, longest first."""

_GAP = "\0"


class CallOrder:
    """This process's calls in one process group, each as the digest of its program.

    Guarantees: the expected program depends only on the calls so far. So if processes have made the
    same calls and continue with different programs, at most one of these programs is expected, and
    every process that calls another one notices, at whatever call that is.

    The expected program is the one that followed when the latest calls were last made, as in
    dictionary coders (J. Ziv, A. Lempel, "A Universal Algorithm for Sequential Data Compression",
    IEEE Transactions on Information Theory 23, 1977). A loop, even a nested one, has unexpected
    calls only in its first few rounds; calls in an irregular order are often unexpected.
    """

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}  # one letter for each digest
        self._history = 0, ""  # the number of forgotten calls, and the letters of the rest
        self._next = 0  # index of the expected call in these letters

    def follow(self, digest: str) -> bool:
        """Record the next call. Return whether its program is the expected one.

        Cost: a microsecond.
        """
        letter = self._letters.setdefault(digest, chr(len(self._letters) + 1))
        forgotten, letters = self._history
        is_expected = letters[self._next : self._next + 1] == letter
        if len(letters) >= 2 * RECENT:
            forgotten, letters = forgotten + RECENT, letters[RECENT:]
            self._next -= RECENT
        self._history = forgotten, letters + letter
        self._next += 1
        if not is_expected or self._next <= 0:
            self._next = self._predict()
        return is_expected

    def interrupt(self) -> None:
        """Withdraw the last call, because processes disagree; nothing is expected after it."""
        forgotten, letters = self._history
        self._history = forgotten, letters[:-1] + _GAP
        self._next = len(letters) - 1

    def ran(self, position: int) -> str | None:
        """Look up the digest of a call by its position, from 1; None: forgotten, or yet to come."""
        forgotten, letters = self._history  # one read, because any thread may call this
        place = position - 1 - forgotten
        if not 0 <= place < len(letters):
            return None
        letter = letters[place]
        return next((digest for digest, known in self._letters.items() if known == letter), "")

    def _predict(self) -> int:
        """Find the longest run of latest calls among earlier ones; return the index after it."""
        letters = self._history[1]
        last = len(letters) - 1
        for length in CONTEXTS:
            if (start := letters.find(letters[-length:], 0, last)) >= 0:
                return start + length
        return last  # the program is new: expect it again
