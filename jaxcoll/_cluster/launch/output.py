"""Write what `jaxcoll launch` shows on its own standard streams, without waiting for a reader."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from jaxcoll._cluster.launch.lines import LONGEST

_ROOM = 1 << 20  # bytes that wait for a reader before no more is read from the processes
_MOST_WAITING = 8 << 20  # bytes that wait while processes end, which nothing may hold up
_CHUNK = 1 << 16
_ERASE = b"\x1b[K"  # erases the rest of a terminal's line, which a longer bar has left


class Outlet:
    """A stream that a thread of its own writes, so that a reader who stops holds nobody up.

    Args:
      stream: what is written to.
      complain: called once, in words, if it cannot be written. Where its reader has left, it is
        not called.
    """

    def __init__(self, stream: BinaryIO, complain: Callable[[str], None]) -> None:
        # Without a buffer: Python would wait for its lock at exit.
        self._stream = getattr(stream, "raw", stream)
        self._complain: Callable[[str], None] | None = complain
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._bytes = 0
        self._is_closed = False
        threading.Thread(target=self._work, name="jaxcoll-output", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether its reader keeps up."""
        return self._bytes < _ROOM

    def put(self, data: bytes) -> None:
        """Write it when there is time; what is too much while nobody reads is left out."""
        if not self._is_closed and self._bytes <= _MOST_WAITING:
            self._count(len(data))
            self._waiting.put(data)

    def drain(self, gives_up: Callable[[], bool]) -> bool:
        """Wait until all is written; whether it is, and was not given up before."""
        while self._bytes:
            if gives_up():
                return False
            time.sleep(0.01)
        return True

    def _count(self, more: int) -> None:
        with self._lock:  # the other stream's thread may complain here
            self._bytes += more

    def _work(self) -> None:
        while True:
            parts = [self._waiting.get()]
            while not self._waiting.empty():  # fewer calls of the system
                parts.append(self._waiting.get())
            data = b"".join(parts)
            try:
                self._write(data)
            except BrokenPipeError:
                self._is_closed = True
            except (OSError, ValueError) as error:
                # A full disk, say, ends no training; there may be room again for what comes later.
                complain, self._complain = self._complain, None
                if complain is not None:
                    complain(getattr(error, "strerror", None) or str(error))
            self._count(-len(data))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = self._stream.write(left[:_CHUNK])
            if written is None:  # somebody made it non-blocking, and it is full
                time.sleep(0.01)
            left = left[written or 0 :]


class Output:
    """Both standard streams of this process; where they are one file, the order is kept."""

    def __init__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        err = Outlet(sys.stderr.buffer, lambda reason: None)
        out = err if _are_one_file() else Outlet(sys.stdout.buffer, self._complain_of_output)
        self._outlets = {"out": out, "err": err}  # drained in this order: the first may complain
        self._is_terminal = {"out": sys.stdout.isatty(), "err": sys.stderr.isatty()}
        self._after_bar: set[Outlet] = set()

    def show(self, rank: int, stream: str, piece: bytes) -> None:
        """Write a piece of what a process printed (see `Lines`) behind its rank."""
        if piece == b"\r":  # a bar that begins where others end
            return
        if not piece.endswith((b"\n", b"\r")):
            piece += b"\n" if len(piece) > LONGEST else b"\r"
        outlet = self._outlets[stream]
        after_bar = outlet in self._after_bar
        erased = _ERASE if after_bar and self._is_terminal[stream] else b""
        ends_bar = after_bar and piece == b"\n"  # which stays to be seen
        outlet.put(piece if ends_bar else erased + b"[%d] " % rank + piece)
        (self._after_bar.add if piece.endswith(b"\r") else self._after_bar.discard)(outlet)

    def complain(self, words: str) -> None:
        """Write a line of the launcher's own on standard error."""
        self._outlets["err"].put(f"jaxcoll launch: {words}\n".encode())

    def has_room(self, stream: str) -> bool:
        """Whether the reader of a stream keeps up."""
        return self._outlets[stream].has_room

    def drain(self, gives_up: Callable[[], bool]) -> bool:
        """Wait until all is written; whether it is, and was not given up before."""
        return all(outlet.drain(gives_up) for outlet in self._outlets.values())

    def _complain_of_output(self, reason: str) -> None:
        self.complain(f"standard output cannot be written ({reason}); the job goes on without it.")


def _are_one_file() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return False
