"""Standard output and standard error of a command, where they may be closed, full or left."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_OF_STREAMS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}

READER_LEFT = 141
"""The exit status where whoever reads, as `head`, has read enough: as of a SIGPIPE."""


def open_closed_streams() -> None:
    """Open the null device where the caller closed a standard stream.

    Else the next file that is opened has its number, and what is printed goes into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this
            os.set_inheritable(handle, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def complain(command: str, words: object) -> None:
    """A line on standard error behind the command's name, if anybody can read it."""
    try:
        print(f"{f'jaxcoll {command}'.rstrip()}: {words}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _discard(sys.stderr)


def new_console(**settings: Any) -> Console:
    """A console of rich that does not end the program where nobody reads any more."""
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich's own exits with 1, which the demo's users take for its verdict

    return Raising(**settings)


def broken_output(error: BaseException | None = None) -> OSError | None:
    """Why standard output cannot be written, and let it go; None: it can.

    Args:
      error: what was raised, perhaps for this reason.
    """
    try:
        sys.stdout.flush()
    except OSError as found:
        _discard(sys.stdout)
        return found
    # A stream without a buffer has nothing left to fail with. Files of results are named by a flag.
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_STREAMS:
        if not isinstance(error, BrokenPipeError) or _has_no_reader(sys.stdout):
            _discard(sys.stdout)
            return error
    return None


def _has_no_reader(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):
        asked = select.poll()
        asked.register(stream.fileno(), 0)  # errors are always told
        return any(event & select.POLLERR for _, event in asked.poll(0))
    return False


def _discard(stream: TextIO) -> None:
    """Let go what a stream holds: Python flushes once more when it ends, and would complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
