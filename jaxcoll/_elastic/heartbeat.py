"""Signs of life: what each worker says of itself every half second, as another one sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from jaxcoll._cluster.liveness import ended, followed
from jaxcoll._elastic.generation import rank_of

BEAT_SECONDS = 0.5
"""How often a worker says that it lives."""

LOST_SECONDS = 2.0
"""After so long without a heartbeat a worker is not taken in; and one of whose end the coordinator
would not tell is taken for dead, once something has gone wrong."""

ENDED = "ended"
"""The last beat of a worker."""


@dataclasses.dataclass(frozen=True)
class Doing:
    """The step that a worker is in. What it says of a step of a generation stays true.

    Attributes:
      generation: its number.
      step: finished steps before this one.
      is_new: it takes a program that it had not run before, which workers do together.
      mark: of the program; "": it is not compiled yet.
    """

    generation: int
    step: int
    is_new: bool = False
    mark: str = ""

    def contradicts(self, other: Doing) -> bool:
        """Whether both are in one step of one generation, with different programs."""
        if (self.generation, self.step) != (other.generation, other.step):
            return False
        differ = bool(self.mark and other.mark) and self.mark != other.mark
        return differ or self.is_new != other.is_new


def out_of_step(doing: Mapping[str, Doing], order: Iterable[str]) -> tuple[str, ...]:
    """The first two workers, in order, that contradict each other; (): there are none."""
    firsts: dict[tuple[int, int], str] = {}
    for name in order:
        now = doing[name]
        first = firsts.setdefault((now.generation, now.step), name)
        if doing[first].contradicts(now):
            return first, name
        if not doing[first].mark and now.mark:
            firsts[now.generation, now.step] = name
    return ()


def beat(count: int, doing: Doing) -> str:
    """What a worker writes."""
    return json.dumps([count, *dataclasses.astuple(doing)])


def named(process: int) -> str:
    """A name for this worker: of its number, which others may have had before or get after it."""
    return f"{process}.{os.urandom(4).hex()}{'' if followed() else _UNTOLD}"


def has_ended(name: str) -> bool:
    """Whether the coordinator has told so, whatever this worker wrote last.

    Of one that was started again it tells nothing, and what it tells with that one's number is of
    its predecessor.
    """
    return not name.endswith(_UNTOLD) and rank_of(name) in ended()


def is_followed(name: str) -> bool:
    """Whether the coordinator would tell this process of that worker's end."""
    return followed() is not None and not name.endswith(_UNTOLD)


_UNTOLD = ".untold"


class Beats:
    """What one worker has seen of everybody's."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float, bool]] = {}

    def observe(self, beats: Mapping[str, str]) -> None:
        """Take a look: those that stand still are known when something goes wrong."""
        now = time.monotonic()
        for name, text in beats.items():
            before, since, moved = self._seen.get(name, (text, now, False))
            self._seen[name] = (text, since, moved) if text == before else (text, now, True)

    def is_silent(self, name: str) -> bool:
        """Whether a worker has ended; where nobody would tell, also whether it says nothing.

        One whose interpreter is held by a call of other code says nothing, lives, and goes on. So
        does one that is stopped, as far as anybody can tell from outside, until a deadline passes.
        """
        ended = has_ended(name) or self._seen.get(name, (ENDED,))[0] == ENDED
        return ended or (not is_followed(name) and self.stands_still(name))

    def stands_still(self, name: str) -> bool:
        """Whether a worker has not said for long that it lives."""
        since = self._seen.get(name, (ENDED, 0.0, False))[1]
        return time.monotonic() - since > LOST_SECONDS

    def is_heard(self, name: str) -> bool:
        """Whether a worker says that it lives, so that it can be taken in."""
        return not (self.is_silent(name) or self.stands_still(name))

    def is_settled(self, name: str) -> bool:
        """Whether it is known if a worker lives."""
        known = name not in self._seen or self._seen[name][2] or self.stands_still(name)
        return known or self.is_silent(name)

    def out_of_step(self, members: Iterable[str], known: Mapping[str, Doing]) -> tuple[str, ...]:
        """Two of them that contradict each other, by what is known and by the others' beats."""
        members = list(members)
        doing = self.doing(name for name in members if name not in known)
        doing |= {name: known[name] for name in members if name in known}
        return out_of_step(doing, sorted(doing, key=rank_of))

    def differing(
        self, members: tuple[str, ...], joined: Sequence[str], known: Mapping[str, Doing]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Members that contradict each other, and those of them who do not go on.

        A worker that was just taken in ends if it contradicts the others. Where those contradict
        each other nobody knows who is right, and all end.

        Args:
          members: who works together.
          joined: those of them that were just taken in.
          known: what is known of what they do; else their heartbeats tell.
        """
        staying = [m for m in members if m not in joined]
        if pair := self.out_of_step(staying or members, known):
            return pair, members
        pairs = {m: self.out_of_step([*staying, m], known) for m in joined}
        odd = tuple(m for m in joined if pairs[m])
        first = [m for m in pairs[odd[0]] if m != odd[0]] if odd else []
        return (*first, *odd), odd

    def begun(self, members: Sequence[str], generation: int) -> int:
        """The step of a generation that all its members have begun, at least; -1: not known."""
        steps = [d.step for d in self.doing(members).values() if d.generation == generation]
        return min(steps) if len(steps) == len(members) else -1

    def doing(self, names: Iterable[str]) -> dict[str, Doing]:
        """What those of `names` that live said last."""
        return {
            name: Doing(*json.loads(self._seen[name][0])[1:])
            for name in names
            if not self.is_silent(name)
        }
