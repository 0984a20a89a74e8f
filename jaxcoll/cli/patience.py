"""Shows a person who watches that something takes its time."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

AFTER = 2.0
"""Seconds without words."""

_EVERY = 0.5
_ERASE = "\r\x1b[K"


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
