"""The calls of a process group that this process has entered, and which it expects next.

Others learn of the calls, and processes need to agree only on surprises: every process predicts for
itself and asks nobody. Processes that made the same calls predict the same, so that either all of
them stop to agree or none does; and a process that is about to do what it never did in this place
stops.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import zlib
from collections import deque
from typing import Any

from jaxcoll._errors import ProgramMismatchError

RECENT = 1 << 14
"""Calls that are remembered. A process further ahead than that is no longer compared."""

SHOWN = 32
"""Calls whose names a process publishes."""

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


@dataclasses.dataclass(frozen=True)
class Entered:
    """One call of a program."""

    position: int  # its sequence number in the group
    mark: str  # a hash of the program's fingerprint
    name: str  # of the program, for messages
    digest: int  # of the marks up to here, in order
    lines: tuple[str, ...] = ()  # the program's fingerprint


class CallHistory:
    """The calls of a group that this process has entered. Any thread may ask."""

    def __init__(self) -> None:
        self._entered: deque[Entered] = deque([Entered(0, "", "nothing", 0)], maxlen=RECENT)
        self._lock = threading.Lock()
        self.agreed = self._entered[0]  # the last that is known to run
        self.is_inside, self._since = False, time.monotonic()  # whether the last has not ended
        self._failed = 0, ""

    @property
    def last(self) -> Entered:
        """The call that was entered last."""
        return self._entered[-1]

    def enter(self, program: Any) -> Entered:
        """Begin the next call, of a `Program`."""
        with self._lock:
            before = self.last
            digest = zlib.crc32(program.mark.encode(), before.digest)
            call = Entered(before.position + 1, program.mark, program.name, digest, program.lines)
            self._entered.append(call)
            self.is_inside, self._since = True, time.monotonic()
        return call

    def leave(self) -> None:
        """The last call has ended."""
        self.is_inside, self._since = False, time.monotonic()

    def fail(self, call: Entered, error: Exception) -> None:
        """A call in which others may wait has failed here; a callback's error is the last line."""
        words = str(error).strip() or type(error).__name__
        self._failed = call.position, words.splitlines()[-1][:300]

    def take_back(self) -> None:
        """Nobody ran the last call: it keeps its number, and is no part of the digest."""
        with self._lock:
            before, call = self._entered[-2], self._entered[-1]
            self._entered[-1] = dataclasses.replace(before, position=call.position, mark="")

    def status(self, position: int) -> dict[str, Any]:
        """Where this process is, for one that is at `position`."""
        with self._lock:
            then = self._at(position)
            return {
                "at": self.last.position,
                "agreed": self.agreed.position,
                "name": self.last.name,
                "inside": self.is_inside,
                "seconds": time.monotonic() - self._since,
                "failed": self._failed[1] if self._failed[0] == position else "",
                "mark": then and then.mark,
                "digest": then and then.digest,
                "then": then and then.name,
                "lines": then and then.lines,
            }

    def published(self) -> dict[str, Any]:
        """What others compare with their own calls by `difference`."""
        with self._lock:
            now = self.agreed
            recent = [c for c in list(self._entered)[-SHOWN:] if c.position <= now.position]
        calls = [[c.position, c.name, c.mark] for c in recent]
        return {"at": now.position, "digest": now.digest, "calls": calls}

    def difference(self, here: int, there: int, published: dict[str, Any]) -> str:
        """How the calls of process `there` differ from this one's, in words; "": not so far."""
        with self._lock:
            mine = self._at(published["at"])
            if mine is None or mine.position > self.agreed.position:
                return ""  # not there yet, or it is being agreed upon
            if mine.digest == published["digest"]:
                return ""
            for position, name, mark in published["calls"]:
                own = self._at(position)
                if own and own.mark != mark:
                    own_name = f"{own.name} on process {here}"
                    return f"call {position} was {own_name} and {name} on process {there}"
        return f"at or before call {published['calls'][0][0]} they called different programs"

    def _at(self, position: int) -> Entered | None:
        back = self.last.position - position
        return self._entered[-1 - back] if 0 <= back < len(self._entered) else None


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


def disordered(difference: str) -> ProgramMismatchError:
    """The error of processes that called programs in different orders."""
    return ProgramMismatchError(
        f"Processes call programs in different orders: {difference}. What these calls and those "
        "after them returned is wrong. Every process has to make the same calls in the same order."
    )


def in_words(status: dict[str, Any]) -> str:
    """Where a process is that is not where it is expected."""
    if not status["at"]:
        return "has made no call over these devices"
    if status["inside"]:
        return f"is in call {status['at']}, {status['name']}, for {status['seconds']:.1f} s"
    return f"has been outside of any call for {status['seconds']:.1f} s, since call {status['at']}"
