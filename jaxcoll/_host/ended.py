"""Who has ended: the coordinator sees their connections close, and tells everybody at once.

The system closes a process's connections however it ends. So this is certain where silence is not:
one that is stopped, or that holds the interpreter, keeps its own.
"""

from __future__ import annotations

import json
import os
import threading


class Line:
    """This process's connection to the coordinator, on which nothing is waited for.

    It stays open until the system closes it, after all else. Any thread may ask.

    Args:
      fd: the descriptor of its socket, which is the line's from now on.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._lock = threading.Lock()
        self._rest = b""
        self._ended: dict[int, float] = {}

    def ended(self) -> dict[int, float]:
        """Processes that have ended, each with the seconds since all had arrived."""
        with self._lock:
            *lines, self._rest = (self._rest + self._read()).split(b"\n")
            said = map(json.loads, lines)
            self._ended |= {one["ended"]: one["after"] for one in said if "ended" in one}
            return dict(self._ended)

    def _read(self) -> bytes:
        heard = b""
        try:
            while chunk := os.read(self.fd, 1 << 16):
                heard += chunk
        except OSError:  # no more for now; or the coordinator is gone
            pass
        return heard

    def close(self) -> None:
        """Leave the job."""
        os.close(self.fd)


_line: Line | None = None


def follow(line: Line | None) -> None:
    """Have `ended` ask this line."""
    global _line
    _line = line


def _leave_to_parent() -> None:
    """A connection that a forked child holds as well stays open when its parent dies."""
    if _line is not None:
        _line.close()
        follow(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


def ended() -> frozenset[int]:
    """Processes of this job that have ended, or were cut off for longer than a heartbeat may take.

    Of one that was started again nothing is told, and nothing at all in a job that was entered
    without jaxcoll's coordinator.
    """
    return frozenset(_line.ended() if _line is not None else ())
