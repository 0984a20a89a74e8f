"""Consoles, tables and progress bars of the commands, by rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
    """A bar of `steps` for each name; yields what to call with the name and words at each step."""
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
