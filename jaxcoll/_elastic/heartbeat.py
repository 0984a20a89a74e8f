"""Heartbeats of an elastic run: what each worker reports, and what others conclude from it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from jaxcoll._elastic.generation import parse_rank
from jaxcoll._job.liveness import coordinator_connection, list_ended
from jaxcoll._job.timing import SILENT_WORKER_SECONDS

ENDED = "ended"
"""The last heartbeat of a worker."""

# In the name of a worker whose end the coordinator does not report, as after a restart: the
# coordinator knows only its number, and has reported the end of its predecessor.
_UNREPORTED = ".unreported"


def name_worker(process: int) -> str:
    """Name this worker by its number, and a part that changes with a restart."""
    return f"{process}.{os.urandom(4).hex()}{'' if coordinator_connection() else _UNREPORTED}"


def is_reported(name: str) -> bool:
    """Say whether the coordinator would report that worker's end to this process."""
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

    def has_ended(self, name: str) -> bool:
        """Judge whether a worker has ended, or is silent where nobody would report its end.

        A worker is also silent while native code holds its interpreter lock, and then goes on. The
        same may be true of a stopped worker, until a deadline passes. So silence counts as an end
        only if no connection would show the end.
        """
        if self._seen.get(name, (ENDED,))[0] == ENDED:
            return True
        if not name.endswith(_UNREPORTED) and parse_rank(name) in list_ended():
            return True
        return not is_reported(name) and self.is_silent(name)

    def is_silent(self, name: str) -> bool:
        since = self._seen.get(name, (ENDED, 0.0, False))[1]
        return time.monotonic() - since > SILENT_WORKER_SECONDS

    def is_alive(self, name: str) -> bool:
        return not (self.has_ended(name) or self.is_silent(name))

    def is_settled(self, name: str) -> bool:
        # The first heartbeat that is seen may be an old one, of a worker that has died.
        settled = name not in self._seen or self._seen[name][2] or self.is_silent(name)
        return settled or self.has_ended(name)
