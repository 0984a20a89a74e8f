"""Heartbeats of an elastic run: what each worker reports, and what others conclude from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxcoll._cluster.liveness import coordinator_connection, ended
from jaxcoll._cluster.timing import SILENT_WORKER_SECONDS
from jaxcoll._elastic.generation import rank_of

ENDED = "ended"
"""The last heartbeat of a worker."""

# In the name of a worker whose end the coordinator does not report, as after a restart: the
# coordinator knows only its number, and has reported the end of its predecessor.
_UNREPORTED = ".unreported"


class StepStatus(NamedTuple):
    """The step that a worker is in. A status stays true after its step."""

    generation: int  # its number
    step: int  # number of finished steps before this one
    is_new: bool = False  # its program has not run before; this must hold for all workers or none
    fingerprint: str = ""  # of the program; "": it is not compiled yet

    def contradicts(self, other: StepStatus) -> bool:
        """Return whether both are in the same step and generation, with different programs."""
        if (self.generation, self.step) != (other.generation, other.step):
            return False
        fingerprints = {self.fingerprint, other.fingerprint} - {""}
        return len(fingerprints) > 1 or self.is_new != other.is_new


def new_name(process: int) -> str:
    """Return a name for this worker: its number, and a part that changes with a restart."""
    return f"{process}.{os.urandom(4).hex()}{'' if coordinator_connection() else _UNREPORTED}"


def has_ended(name: str) -> bool:
    """Return whether the coordinator reported this worker's end."""
    return not name.endswith(_UNREPORTED) and rank_of(name) in ended()


def is_reported(name: str) -> bool:
    """Return whether the coordinator would report that worker's end to this process."""
    return coordinator_connection() is not None and not name.endswith(_UNREPORTED)


class Heartbeats:
    """The heartbeats of all workers, as one worker has seen them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float, bool]] = {}  # text, since when, ever changed

    def observe(self, heartbeats: Mapping[str, str]) -> None:
        """Record which heartbeats changed since the previous call."""
        now = time.monotonic()
        for name, text in heartbeats.items():
            before, since, changed = self._seen.get(name, (text, now, False))
            self._seen[name] = (text, since, changed) if text == before else (text, now, True)

    def is_silent(self, name: str) -> bool:
        """Return whether a worker has ended, or is late if nobody would report its end.

        A worker is also late while native code holds its interpreter lock, and then goes on. The
        same may be true of a stopped worker, until a deadline passes. So lateness counts as death
        only if no connection would show the death.
        """
        has_left = has_ended(name) or self._seen.get(name, (ENDED,))[0] == ENDED
        return has_left or (not is_reported(name) and self.is_late(name))

    def is_late(self, name: str) -> bool:
        """Return whether a worker has not written a heartbeat for too long."""
        since = self._seen.get(name, (ENDED, 0.0, False))[1]
        return time.monotonic() - since > SILENT_WORKER_SECONDS

    def is_alive(self, name: str) -> bool:
        """Return whether a worker writes heartbeats, so that it can join."""
        return not (self.is_silent(name) or self.is_late(name))

    def is_settled(self, name: str) -> bool:
        """Return whether a worker's state is certain: its first heartbeat may be an old one."""
        settled = name not in self._seen or self._seen[name][2] or self.is_late(name)
        return settled or self.is_silent(name)

    def differing(
        self, members: tuple[str, ...], joined: Sequence[str], offered: Mapping[str, StepStatus]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return members with different programs, and the members that must end for it.

        A newcomer ends if it contradicts the others. If these contradict each other, nobody knows
        who is right, and all end.
        """
        staying = [m for m in members if m not in joined]
        if pair := self.contradicting(staying or members, offered):
            return pair, members
        pairs = {m: self.contradicting([*staying, m], offered) for m in joined}
        odd = tuple(m for m in joined if pairs[m])
        first = [m for m in pairs[odd[0]] if m != odd[0]] if odd else []
        return (*first, *odd), odd

    def contradicting(
        self, members: Iterable[str], offered: Mapping[str, StepStatus]
    ) -> tuple[str, ...]:
        """Return the first two members, by number, that contradict each other, or ()."""
        members = sorted(members, key=rank_of)
        statuses = self.statuses(members) | {m: offered[m] for m in members if m in offered}
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
        """Return the last status of each worker that is not silent."""
        return {
            name: StepStatus(*json.loads(self._seen[name][0])[1])
            for name in names
            if not self.is_silent(name)
        }
