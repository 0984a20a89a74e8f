"""What `jaxcoll launch` writes on its own standard streams, without ever waiting for a reader."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from jaxcoll._cluster.launch.lines import LONGEST, Outlet

_ERASE = b"\x1b[K"  # what a longer bar left on this line of a terminal


class Output:
    """Both standard streams of this process; where they are one file, the order is kept."""

    def __init__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        err = Outlet(sys.stderr.buffer, lambda reason: None)
        self._outlets = {
            "err": err,
            "out": err if _are_one_file() else Outlet(sys.stdout.buffer, self._complain_of_output),
        }
        self._is_terminal = {"out": sys.stdout.isatty(), "err": sys.stderr.isatty()}
        self._after_bar: set[Outlet] = set()

    def show(self, rank: int, stream: str, piece: bytes) -> None:
        """Write what a process printed behind its rank; see `Lines` for pieces."""
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
        """A line of the launcher's own on standard error."""
        self._outlets["err"].put(f"jaxcoll launch: {words}\n".encode())

    def has_room(self, stream: str) -> bool:
        """Whether the reader of a stream keeps up."""
        return self._outlets[stream].has_room

    def drain(self, gives_up: Callable[[], bool]) -> bool:
        """Wait until all is written; whether it is, and was not given up before."""
        return all(self._outlets[stream].drain(gives_up) for stream in ("out", "err"))

    def _complain_of_output(self, reason: str) -> None:
        self.complain(f"standard output cannot be written ({reason}); the job goes on without it.")


def _are_one_file() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return False
