"""Standard output and error of a command, which may be closed, full or without a reader."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_OF_STREAMS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}

READER_LEFT = 141
"""The exit status when the reader, such as `head`, has read enough: as after a SIGPIPE."""


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


def complain(command: str, words: object) -> None:
    """Print a line behind the command's name on standard error, if it can be written."""
    try:
        print(f"{f'jaxcoll {command}'.rstrip()}: {words}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _discard(sys.stderr)


def new_console(**settings: Any) -> Console:
    """A console of rich that raises where the reader has left."""
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich's own exits with 1, which is the demo's verdict

    return Raising(**settings)


def new_table(columns: Sequence[str], align: str, title: str = "", **each: Any) -> Table:
    """A table of rich with a line under its header; `align` has "<" or ">" for each column."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for column, side in zip(columns, align, strict=True):
        table.add_column(column, justify="left" if side == "<" else "right", **each)
    return table


@contextlib.contextmanager
def progress_bars(
    console: Console, names: Sequence[str], steps: int, *, transient: bool = False
) -> Iterator[Callable[[str, str], None]]:
    """A bar of `steps` for each name.

    Yields:
      What to call at each step, with the name and words to show behind its bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[words]}"),
    )  # fmt: skip
    # Transient bars are for a person who watches; others are part of what is printed.
    disable = transient and not console.is_terminal
    with Progress(*columns, console=console, transient=transient, disable=disable) as progress:
        tasks = {n: progress.add_task(n, total=steps, words="", start=False) for n in names}

        def advance(name: str, words: str) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], advance=1, words=words)

        yield advance


def broken_output(error: BaseException | None = None) -> OSError | None:
    """Why standard output cannot be written, which is then discarded; None: it can be.

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
