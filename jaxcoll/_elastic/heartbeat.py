"""Heartbeats of an elastic run: what each worker writes about itself, and what others conclude."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxcoll._cluster.liveness import ended, followed
from jaxcoll._cluster.timing import SILENT_WORKER_SECONDS
from jaxcoll._elastic.generation import rank_of

ENDED = "ended"
"""The last heartbeat of a worker."""

# In the name of a worker whose end the coordinator does not report, as after a restart: the
# coordinator knows its number only, and reported the end of its predecessor.
_UNFOLLOWED = ".unfollowed"


class StepStatus(NamedTuple):
    """The step that a worker is in. A statement about a step of a generation stays true."""

    generation: int  # its number
    step: int  # finished steps before this one
    is_new: bool = False  # it takes a program that it had not run before, which workers do together
    fingerprint: str = ""  # of the program; "": it is not compiled yet

    def contradicts(self, other: StepStatus) -> bool:
        """True if both are in one step of one generation, with different programs."""
        if (self.generation, self.step) != (other.generation, other.step):
            return False
        marks = {self.fingerprint, other.fingerprint} - {""}
        return len(marks) > 1 or self.is_new != other.is_new


def new_name(process: int) -> str:
    """A name for this worker: its number, and a part that its predecessors and successors lack."""
    return f"{process}.{os.urandom(4).hex()}{'' if followed() else _UNFOLLOWED}"


def has_ended(name: str) -> bool:
    """True if the coordinator reported this worker's end, whatever its last heartbeat was."""
    return not name.endswith(_UNFOLLOWED) and rank_of(name) in ended()


def is_followed(name: str) -> bool:
    """True if the coordinator would report that worker's end to this process."""
    return followed() is not None and not name.endswith(_UNFOLLOWED)


class Heartbeats:
    """The heartbeats of all workers, as one worker has seen them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float, bool]] = {}  # text, since when, whether it changed

    def observe(self, heartbeats: Mapping[str, str]) -> None:
        """Note which heartbeats changed since the last look."""
        now = time.monotonic()
        for name, text in heartbeats.items():
            before, since, changed = self._seen.get(name, (text, now, False))
            self._seen[name] = (text, since, changed) if text == before else (text, now, True)

    def is_silent(self, name: str) -> bool:
        """True if a worker has ended; where nobody would report that, also if it is late.

        A worker whose interpreter is held by foreign code is late, lives, and goes on. So does one
        that is stopped, as far as others can tell, until a deadline passes. Lateness therefore
        counts as death only where no connection tells.
        """
        has_left = has_ended(name) or self._seen.get(name, (ENDED,))[0] == ENDED
        return has_left or (not is_followed(name) and self.is_late(name))

    def is_late(self, name: str) -> bool:
        """True if a worker has not written for long."""
        since = self._seen.get(name, (ENDED, 0.0, False))[1]
        return time.monotonic() - since > SILENT_WORKER_SECONDS

    def is_alive(self, name: str) -> bool:
        """True if a worker writes, so that it can be taken in."""
        return not (self.is_silent(name) or self.is_late(name))

    def is_settled(self, name: str) -> bool:
        """True if a worker is known to live or not: a first heartbeat may be that of a dead one."""
        known = name not in self._seen or self._seen[name][2] or self.is_late(name)
        return known or self.is_silent(name)

    def differing(
        self, members: tuple[str, ...], joined: Sequence[str], known: Mapping[str, StepStatus]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Members that contradict each other, and those of them that end for it.

        A worker that was just taken in ends if it contradicts the others. Where those contradict
        each other nobody knows who is right, and all end.
        """
        staying = [m for m in members if m not in joined]
        if pair := self.contradicting(staying or members, known):
            return pair, members
        pairs = {m: self.contradicting([*staying, m], known) for m in joined}
        odd = tuple(m for m in joined if pairs[m])
        first = [m for m in pairs[odd[0]] if m != odd[0]] if odd else []
        return (*first, *odd), odd

    def contradicting(
        self, members: Iterable[str], known: Mapping[str, StepStatus]
    ) -> tuple[str, ...]:
        """The first two members, by number, that contradict each other; (): there are none."""
        members = sorted(members, key=rank_of)
        statuses = self.statuses(members) | {m: known[m] for m in members if m in known}
        firsts: dict[tuple[int, int], str] = {}
        for name in (m for m in members if m in statuses):
            now = statuses[name]
            first = firsts.setdefault((now.generation, now.step), name)
            if statuses[first].contradicts(now):
                return first, name
            if not statuses[first].fingerprint and now.fingerprint:
                firsts[now.generation, now.step] = name
        return ()

    def statuses(self, names: Iterable[str]) -> dict[str, StepStatus]:
        """The last status of those workers that live."""
        return {
            name: StepStatus(*json.loads(self._seen[name][0])[1])
            for name in names
            if not self.is_silent(name)
        }
