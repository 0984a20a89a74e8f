"""What processes print: read as it comes, and written on by a launcher that waits for no reader."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, BinaryIO

LONGEST = 16 << 20
"""Bytes of a line that are kept until its end comes."""

_CHUNK = 1 << 16
_PIPE = 1 << 20  # bytes that a pipe can hold, at most
_QUIET = 0.1  # seconds after which a progress bar without an end is passed on
_ROOM = 1 << 20  # bytes that wait for a reader before no more is read from the processes
_MOST_WAITING = 8 << 20  # bytes that wait while processes end, which nothing may hold up
_ERASE = b"\x1b[K"  # erases the rest of a terminal's line, which a longer bar has left


class Lines:
    """The output of processes in pieces, each of which ends a line or is a progress bar's.

    All pieces of a stream together are what was printed, and a last line's end where it had none.

    Args:
      show: called with the rank, the stream ("out" or "err") and a piece. A piece without an end
        belongs to a bar that was quiet for a while, or to a line of more than `LONGEST` bytes.
      has_room: called with the stream: whether more of it can be shown now.
    """

    def __init__(
        self,
        show: Callable[[int, str, bytes], None],
        has_room: Callable[[str], bool] = lambda stream: True,
    ) -> None:
        self._show, self._has_room = show, has_room
        self._selector = selectors.DefaultSelector()

    def of(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Listen to a process that has pipes."""
        for name, pipe in (("out", process.stdout), ("err", process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                stream = _Stream(name, pipe, functools.partial(self._show, rank, name))
                self._selector.register(pipe, selectors.EVENT_READ, stream)

    def pass_on(self, seconds: float, *, freely: bool = False) -> None:
        """Show what comes within some time, `freely` also where there is no room for it."""
        streams = self._streams()
        ready = [key.data for key, _ in self._selector.select(seconds)] if streams else []
        readable = [stream for stream in ready if freely or self._has_room(stream.name)]
        for stream in readable:
            self._read(stream)
        if not readable:  # `select` returns at once for what is ready and has no room
            time.sleep(0.01 if ready else 0 if streams else seconds)
        for stream in streams:
            stream.show_quiet_bar()

    def finish(self) -> None:
        """Show what is left, unfinished lines too, and wait for nobody."""
        for stream in self._streams():
            # No more than a pipe holds: a process that left its session may print on and on.
            for _ in range(_PIPE // _CHUNK):
                if not self._read(stream):
                    break
            if not stream.pipe.closed:
                self._end(stream)
        self._selector.close()

    def _streams(self) -> list[_Stream]:
        return [key.data for key in self._selector.get_map().values()]

    def _read(self, stream: _Stream) -> bool:
        """Read once; whether there may be more."""
        try:
            chunk = os.read(stream.pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if chunk:
            stream.add(chunk)
        else:
            self._end(stream)
        return bool(chunk)

    def _end(self, stream: _Stream) -> None:
        stream.end()
        self._selector.unregister(stream.pipe)
        stream.pipe.close()


class _Stream:
    """One stream of a process, and what was read of it since the last end of a line."""

    def __init__(self, name: str, pipe: IO[bytes], show: Callable[[bytes], None]) -> None:
        self.name, self.pipe = name, pipe
        self._show = show
        self._held = bytearray()
        self._is_bar = False
        self._since = 0.0

    def add(self, chunk: bytes) -> None:
        self._since = time.monotonic()
        # A return at the end of a chunk is a bar's, unless the next one makes it "\r\n".
        if self._held.endswith(b"\r") and not chunk.startswith(b"\n"):
            self._pass_on()
        *pieces, last = chunk.splitlines(keepends=True)
        for piece in pieces:
            self._held += piece
            self._pass_on()
        self._held += last
        if last.endswith(b"\n") or len(self._held) > LONGEST:
            self._pass_on()

    def show_quiet_bar(self) -> None:
        """Show a bar without an end, if nothing came for a while: the next may take minutes."""
        is_bar = self._is_bar or self._held.endswith(b"\r")
        if self._held and is_bar and time.monotonic() > self._since + _QUIET:
            self._pass_on()

    def end(self) -> None:
        if self._held:
            self._held += b"\n"
            self._pass_on()

    def _pass_on(self) -> None:
        piece, self._held = bytes(self._held), bytearray()
        # What follows a bar is a bar, until a line ends.
        self._is_bar = (self._is_bar or piece.endswith(b"\r")) and not piece.endswith(b"\n")
        self._show(piece)


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
        return self._outlets[stream].has_room

    def drain(self, gives_up: Callable[[], bool]) -> bool:
        return all(outlet.drain(gives_up) for outlet in self._outlets.values())

    def _complain_of_output(self, reason: str) -> None:
        self.complain(f"standard output cannot be written ({reason}); the job goes on without it.")


def _are_one_file() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return False
