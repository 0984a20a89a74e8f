"""The order in which a process calls programs, and the program that it expects next."""

from __future__ import annotations

RECENT = 1 << 13
"""Calls that are remembered, at least."""

CONTEXTS = (16, 8, 4, 2, 1)
"""Numbers of last calls that are looked for among the earlier ones, longest first."""

_GAP = "\0"


class CallOrder:
    """The calls of one process group that this process has made, each by the mark of its program.

    Guarantees: what is expected follows from the calls so far and from nothing else. Of processes
    that made the same calls and go on with different programs, all but those of one program are
    surprised, at whatever call that is.

    Expected is what followed where the last calls were made before, as dictionary coders predict
    (J. Ziv, A. Lempel, "A Universal Algorithm for Sequential Data Compression", IEEE Transactions
    on Information Theory 23, 1977). A loop, also one of loops, surprises a few times in its first
    rounds and then no more; calls in an irregular order surprise often.
    """

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}  # one for each mark
        self._history = 0, ""  # how many calls were forgotten, and the letters of the others
        self._next = 0  # the place in these letters of the one that is expected

    def follow(self, mark: str) -> bool:
        """Note that a program is called next; whether it is the expected one.

        Cost: a microsecond.
        """
        letter = self._letters.setdefault(mark, chr(len(self._letters) + 1))
        forgotten, letters = self._history
        is_expected = letters[self._next : self._next + 1] == letter
        if len(letters) >= 2 * RECENT:
            forgotten, letters = forgotten + RECENT, letters[RECENT:]
            self._next -= RECENT
        self._history = forgotten, letters + letter
        self._next += 1
        if not is_expected or self._next <= 0:
            self._next = self._place()
        return is_expected

    def interrupt(self) -> None:
        """Take the last call back, because processes disagree: nothing is expected after it."""
        forgotten, letters = self._history
        self._history = forgotten, letters[:-1] + _GAP
        self._next = len(letters) - 1

    def ran(self, position: int) -> str | None:
        """The mark of the call at this position, from 1; None: it is forgotten, or to come."""
        forgotten, letters = self._history  # at once: any thread may ask
        place = position - 1 - forgotten
        if not 0 <= place < len(letters):
            return None
        letter = letters[place]
        return next((mark for mark, known in self._letters.items() if known == letter), "")

    def _place(self) -> int:
        """The place after the first that the last calls have in common with earlier ones."""
        letters = self._history[1]
        last = len(letters) - 1
        for length in CONTEXTS:
            if (found := letters.find(letters[-length:], 0, last)) >= 0:
                return found + length
        return last  # it was never called before: a repetition is expected
