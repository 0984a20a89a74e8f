"""Ends of processes: the coordinator sees their connections close, and reports it.

The system closes a process's connections at once, however the process ends. Silence tells less: a
process that is stopped, or holds the interpreter, is silent too, and keeps its connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

from jaxcoll._cluster.coordinator import news_of
from jaxcoll._threads import in_forked_child

CONNECTED, DEVICES, LEFT = "connected", "devices", "left"
"""Stages of the start: JAX's clients are connected; all know each other's devices. Or: this process
gave up waiting for others, because of one that is reported otherwise, or of a deadline."""

_LONGEST = 1 << 17


class CoordinatorConnection:
    """This process's connection to the coordinator, which is read without waiting.

    It owns its socket's descriptor, which the system closes after all else. Any thread may use it.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._lock = threading.Lock()
        self._rest = b""
        self._news: dict[int, dict[str, Any]] = {}
        self.is_broken = False  # the coordinator has ended, or is cut off, as of the last read

    def news(self) -> dict[int, dict[str, Any]]:
        """Return the report on each process that has ended; see `news_of`."""
        with self._lock:
            *lines, self._rest = (self._rest + self._read()).split(b"\n")
            self._rest = self._rest[:_LONGEST]
            for line in lines:
                if news := news_of(line):
                    self._news[news["ended"]] = news
            return dict(self._news)

    def lost_before(self, *stages: str) -> tuple[int, ...]:
        """Processes that ended before any of these stages, and not because of another process."""
        news = self.news()
        return tuple(sorted(p for p in news if news[p]["stage"] not in (*stages, LEFT)))

    def _read(self) -> bytes:
        received = b""
        try:
            while chunk := os.read(self.fd, 1 << 16):
                received += chunk
            self.is_broken = True  # an empty read: the other end has closed
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
        return received

    def report(self, **fields: Any) -> None:
        """When this process has ended, the others learn its `stage`, or what it had `done`."""
        with contextlib.suppress(OSError):
            os.write(self.fd, json.dumps(fields).encode() + b"\n")

    def close(self) -> None:
        """Leave the job."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


_connection: CoordinatorConnection | None = None


def follow(connection: CoordinatorConnection | None) -> None:
    """Have `ended` read this connection."""
    global _connection
    _connection = connection


def followed() -> CoordinatorConnection | None:
    """The connection that `ended` reads.

    None: this process was restarted, or entered its job without jaxcoll's coordinator. Then its end
    is not reported to others, nor theirs to it.
    """
    return _connection


def ended() -> dict[int, dict[str, int]]:
    """Processes that have ended, or were cut off for longer than a heartbeat may take.

    For each what it had done, by its `report`; nothing for one that died.
    """
    connection = _connection  # which another thread may let go meanwhile
    news = connection.news() if connection is not None else {}
    return {process: fields.get("done", {}) for process, fields in news.items()}


@in_forked_child
def _leave_to_parent() -> None:
    """Close a forked child's copy, which would keep the connection open when its parent dies."""
    if _connection is not None:
        _connection.close()
        follow(None)
