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

from jaxcoll._cluster.coordinator import news_of

CONNECTED, DEVICES, LEFT = "connected", "devices", "left"
"""Stages of the start: JAX's clients are connected; all know each other's devices. Or this process
waited for others no longer, of whom there is other news, or none."""

_LONGEST = 1 << 17


class Line:
    """This process's connection to the coordinator, on which nothing is waited for.

    It stays open until the system closes it, after all else. Any thread may ask.

    Args:
      fd: the descriptor of its socket, which is the line's from now on.

    Attributes:
      is_broken: the coordinator has ended, or is cut off, as was found when it was asked last.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._lock = threading.Lock()
        self._rest = b""
        self._news: dict[int, dict[str, Any]] = {}
        self.is_broken = False

    def news(self) -> dict[int, dict[str, Any]]:
        """What was told of each process that has ended; see `news_of`."""
        with self._lock:
            *lines, self._rest = (self._rest + self._read()).split(b"\n")
            self._rest = self._rest[:_LONGEST]
            for line in lines:
                if news := news_of(line):
                    self._news[news["ended"]] = news
            return dict(self._news)

    def lost_before(self, *stages: str) -> tuple[int, ...]:
        """Processes that ended before they reached any of these stages, by themselves."""
        news = self.news()
        return tuple(sorted(p for p in news if news[p]["stage"] not in (*stages, LEFT)))

    def _read(self) -> bytes:
        heard = b""
        try:
            while chunk := os.read(self.fd, 1 << 16):
                heard += chunk
            self.is_broken = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
        return heard

    def say(self, stage: str) -> None:
        """Have the others told, when this process has ended, how far it had come."""
        self._write({"stage": stage})

    def say_farewell(self, done: Mapping[str, int]) -> None:
        """Have the others told, when this process has ended, what it had done."""
        self._write({"done": done})

    def _write(self, fields: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(self.fd, json.dumps(fields).encode() + b"\n")

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
