"""What processes print, read line by line as it comes, and written without waiting for readers."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

LONGEST = 16 << 20
"""Bytes of a line that are kept for its end."""

_ROOM = 1 << 20  # bytes that wait for a reader before no more is read from the processes
_MOST_WAITING = 8 << 20  # bytes that wait while processes end, which nothing may hold up
_CHUNK = 1 << 16
_QUIET = 0.1  # seconds after which a bar that has no end yet is passed on


class Outlet:
    """A stream that is written by a thread of its own, so that a reader who stops stops nobody.

    Args:
      stream: what is written to.
      complain: told once, in words, if it cannot be written. Where its reader has left, nobody is.
    """

    def __init__(self, stream: BinaryIO, complain: Callable[[str], None]) -> None:
        # Without a buffer: Python would wait for its lock at exit.
        self._stream = getattr(stream, "raw", stream)
        self._complain: Callable[[str], None] | None = complain
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._is_closed = False
        threading.Thread(target=self._work, name="jaxcoll-output", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether its reader keeps up."""
        return self._bytes < _ROOM

    def put(self, data: bytes) -> None:
        """Write it when there is time; what is too much while nobody reads is left out."""
        with self._changed:
            if self._is_closed or self._bytes > _MOST_WAITING:
                return
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    def drain(self, gives_up: Callable[[], bool]) -> bool:
        """Wait until all is written; whether it is, and was not given up before."""
        with self._changed:
            while self._bytes:
                if gives_up():
                    return False
                self._changed.wait(0.05)
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = b"".join(self._waiting)
                self._waiting.clear()
            try:
                self._write(data)
            except BrokenPipeError:
                self._is_closed = True
            except (OSError, ValueError) as error:
                # A full disk, say, ends no training; there may be room again for what comes later.
                complain, self._complain = self._complain, None
                if complain is not None:
                    complain(getattr(error, "strerror", None) or str(error))
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = self._stream.write(left[:_CHUNK])
            if written is None:  # somebody made it non-blocking, and it is full
                time.sleep(0.01)
            left = left[written or 0 :]


class Lines:
    """What processes print: each piece ends with a line, or with a progress bar's return.

    All pieces of a stream together are what was printed, and a last line's end where it had none.

    Args:
      say: given the rank, the stream ("out" or "err") and a piece. One without an end belongs to a
        bar that was quiet for a while, or to a line of more than `LONGEST` bytes.
      has_room: given the stream, whether more of it can be passed on now.
    """

    def __init__(
        self,
        say: Callable[[int, str, bytes], None],
        has_room: Callable[[str], bool] = lambda stream: True,
    ) -> None:
        self._say, self._has_room = say, has_room
        self._selector = selectors.DefaultSelector()

    def of(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Listen to a process that has pipes."""
        for stream, pipe in (("out", process.stdout), ("err", process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                told = _Unfinished(lambda piece, to=stream: self._say(rank, to, piece))
                self._selector.register(pipe, selectors.EVENT_READ, (stream, told))

    def pass_on(self, seconds: float, *, freely: bool = False) -> None:
        """Pass on what comes within some time, and return as soon as something has.

        Args:
          seconds: the time.
          freely: also what there is no room for, so that the processes are not held up.
        """
        keys = list(self._selector.get_map().values())
        ready = [key for key, _ in self._selector.select(seconds)] if keys else []
        read = [key for key in ready if freely or self._has_room(key.data[0])]
        for key in read:
            self._read(key)
        if not read:
            time.sleep(0.01 if ready else 0 if keys else seconds)
        for key in keys:
            key.data[1].pass_on_quiet()

    def finish(self) -> None:
        """Pass on what is left, unfinished lines too; nobody is waited for."""
        for key in list(self._selector.get_map().values()):
            # No more than a pipe holds: what has left its session may print on and on.
            for _ in range(_ROOM // _CHUNK):
                if not self._read(key):
                    break
            if not key.fileobj.closed:  # pyright: ignore[reportAttributeAccessIssue]
                self._end(key)
        self._selector.close()

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Read once; whether there may be more."""
        try:
            chunk = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            chunk = None
        if chunk:
            key.data[1].add(chunk)
            return True
        if chunk is not None:
            self._end(key)
        return False

    def _end(self, key: selectors.SelectorKey) -> None:
        key.data[1].end()
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]


class _Unfinished:
    """The end of a stream that has no line's end yet."""

    def __init__(self, say: Callable[[bytes], None]) -> None:
        self._say = say
        self._held: list[bytes] = []
        self._length = 0
        self._is_bar = False
        self._since = 0.0

    def add(self, chunk: bytes) -> None:
        self._since = time.monotonic()
        if self._ends_with_return and not chunk.startswith(b"\n"):
            self._pass_on()
        *whole, last = chunk.splitlines(keepends=True)
        for piece in whole:
            self._hold(piece)
            self._pass_on()
        self._hold(last)
        if last.endswith(b"\n") or self._length > LONGEST:
            self._pass_on()

    def pass_on_quiet(self) -> None:
        """Pass on a bar without an end, if none came for a while: the next may take minutes."""
        is_bar = self._held and (self._is_bar or self._ends_with_return)
        if is_bar and time.monotonic() > self._since + _QUIET:
            self._pass_on()

    def end(self) -> None:
        if self._held:
            self._hold(b"\n")
            self._pass_on()

    @property
    def _ends_with_return(self) -> bool:
        """Whether the next byte decides if a return ends a line or is a bar's."""
        return bool(self._held) and self._held[-1].endswith(b"\r")

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._length += len(data)

    def _pass_on(self) -> None:
        piece = b"".join(self._held)
        self._held.clear()
        self._length = 0
        # What follows a bar is a bar, until a line ends.
        self._is_bar = (self._is_bar or piece.endswith(b"\r")) and not piece.endswith(b"\n")
        self._say(piece)
