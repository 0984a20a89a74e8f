"""Standard output and error of a command: closed, full, without a reader, or watched by one."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

_OF_STREAMS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}

READER_LEFT = 141
"""The exit status when the reader, such as `head`, has read enough: as after a SIGPIPE."""

AFTER = 2.0
"""Seconds without words."""

_EVERY = 0.5
_ERASE = "\r\x1b[K"


def open_closed_streams() -> None:
    """Open the null device where the caller closed a standard stream.

    Otherwise the next file that is opened gets its number, and what is printed goes into it.
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


def terminal_width() -> int | None:
    """Characters of a line of the terminal that standard output is; None: it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def complain(command: str, words: object) -> None:
    """Print a line behind the command's name on standard error, if it can be written."""
    try:
        print(f"{f'jaxcoll {command}'.rstrip()}: {words}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _discard(sys.stderr)


def broken_output(error: BaseException | None = None) -> OSError | None:
    """Why standard output cannot be written, which is then discarded; None: it can be."""
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
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are reported for any mask
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def _discard(stream: TextIO) -> None:
    """Send what a stream holds nowhere: Python flushes once more at its end, and would complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


@contextlib.contextmanager
def patience(words: str) -> Iterator[None]:
    """Show `words` and the seconds on standard error, if that is a terminal, until this is done."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(words, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(words: str, done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(AFTER):
        return
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or closed
        while not done.wait(_EVERY):
            seconds = time.monotonic() - start
            print(f"{_ERASE}{words} … {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        print(_ERASE, end="", file=sys.stderr, flush=True)
