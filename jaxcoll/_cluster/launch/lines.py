"""Read what processes print, line by line as it comes."""

from __future__ import annotations

import functools
import os
import selectors
import subprocess
import time
from collections.abc import Callable
from typing import IO

LONGEST = 16 << 20
"""Bytes of a line that are kept until its end comes."""

_CHUNK = 1 << 16
_PIPE = 1 << 20  # bytes that a pipe can hold, at most
_QUIET = 0.1  # seconds after which a progress bar without an end is passed on


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
