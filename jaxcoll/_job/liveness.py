"""Reports of processes that have ended: the coordinator sees their connections close.

The operating system closes a process's connections at once, however the process ends. Silence says
less: a process that is stopped, or holds the interpreter lock, is silent and keeps its connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from jaxcoll._job.coordinator_process import parse_news
from jaxcoll._job.threads import run_in_forked_child

CONNECTED, DEVICES, LEFT = "connected", "devices", "left"
"""Stages of startup: JAX's clients are connected; all know each other's devices; or this process
gave up waiting, because of a deadline or of another process whose end is reported separately."""

_LONGEST = 1 << 17


class CoordinatorConnection:
    """This process's connection to the coordinator. Reads do not block; any thread may use it.

    It owns its socket's file descriptor, which the operating system closes last of all.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._lock = threading.Lock()
        self._rest = b""
        self._news: dict[int, dict[str, Any]] = {}
        self.before_close: list[Callable[[], None]] = []  # which make their last reports
        self.is_broken = False  # at the last read the coordinator had ended, or was cut off

    def news(self) -> dict[int, dict[str, Any]]:
        """Read the reports on processes that have ended, in the form of `parse_news`."""
        with self._lock:
            *lines, self._rest = (self._rest + self._read()).split(b"\n")
            self._rest = self._rest[:_LONGEST]
            for line in lines:
                if news := parse_news(line):
                    self._news[news["ended"]] = news
            return dict(self._news)

    def find_lost(self, *stages: str) -> tuple[int, ...]:
        """Find the processes that ended before these stages, unless they gave up waiting."""
        news = self.news()
        return tuple(sorted(p for p in news if news[p]["stage"] not in (*stages, LEFT)))

    def _read(self) -> bytes:
        received = b""
        try:
            while chunk := os.read(self.fd, 1 << 16):
                received += chunk
            self.is_broken = True  # an empty read: the other end closed the connection
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
        return received

    def report(self, **fields: Any) -> None:
        """Record this process's `stage`, or what it has `done`, for others to read once it ends."""
        with contextlib.suppress(OSError):
            os.write(self.fd, json.dumps(fields).encode() + b"\n")

    def close(self) -> None:
        for report in self.before_close:
            report()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


_connection: CoordinatorConnection | None = None


def use_connection(connection: CoordinatorConnection | None) -> None:
    """Make `list_ended` read this connection."""
    global _connection
    _connection = connection


def coordinator_connection() -> CoordinatorConnection | None:
    """Get the connection that `list_ended` reads.

    It is None if this process was restarted, or joined its job without jaxcoll's coordinator. Then
    its end is not reported to others, nor theirs to it.
    """
    return _connection


def list_ended() -> dict[int, dict[str, int]]:
    """List the processes that have ended, or were cut off for longer than the heartbeat timeout.

    The value of each is what it had `done` by its `report`, empty if it died.
    """
    connection = _connection  # another thread may replace it meanwhile
    news = connection.news() if connection is not None else {}
    return {process: fields.get("done", {}) for process, fields in news.items()}


@run_in_forked_child
def _leave_to_parent() -> None:
    """Close a forked child's copy, which would keep the connection open after its parent died."""
    if _connection is not None:
        _connection.close()
        use_connection(None)
