"""Who has ended: the coordinator sees their connections close, and tells everybody at once.

The system closes a process's connections however it ends, and at once. Silence tells less: one that
is stopped, or that holds the interpreter, is silent too, and keeps its connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from typing import Any


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
        self._news: dict[int, dict[str, Any]] = {}

    def news(self) -> dict[int, dict[str, Any]]:
        """What was told of each process that has ended.

        That is `after`, in seconds since all had arrived, and `done`, its farewell, if it said one.
        """
        with self._lock:
            *lines, self._rest = (self._rest + self._read()).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # the coordinator died while it wrote
                    said = json.loads(line)
                    if "ended" in said:
                        self._news[said["ended"]] = said
            return dict(self._news)

    def _read(self) -> bytes:
        heard = b""
        with contextlib.suppress(OSError):  # no more for now; or the coordinator is gone
            while chunk := os.read(self.fd, 1 << 16):
                heard += chunk
        return heard

    def say_farewell(self, done: Mapping[str, int]) -> None:
        """Have the others told, when this process has ended, what it had done."""
        with contextlib.suppress(OSError):
            os.write(self.fd, json.dumps({"done": done}).encode() + b"\n")

    def close(self) -> None:
        """Leave the job."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


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


def followed() -> Line | None:
    """The line that is asked.

    None: nobody will be told of the end of this process, nor it of theirs, because it was started
    again, or entered its job without jaxcoll's coordinator.
    """
    return _line


def ended() -> dict[int, dict[str, int]]:
    """Processes of this job that have ended, or were cut off for longer than a heartbeat may take.

    Returns:
      Beside each what it had done, as `Line.say_farewell` told; nothing of one that died.
    """
    line = _line
    told = line.news() if line is not None else {}
    return {process: said.get("done", {}) for process, said in told.items()}
