"""What the demonstration shows in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import jaxcoll as jc
from jaxcoll._plan.plan import COLUMNS
from jaxcoll.bench.terminal import new_console
from jaxcoll.demos.demonstration import LEAST_ACCURACY, MOST_DIFFERENCE, Outcome, Traffic, counted


@contextlib.contextmanager
def progress_bars(
    devices: Sequence[jax.Device], steps: int
) -> Iterator[Callable[[bool, float], None]]:
    """A bar for the training over all devices, and one for the reference on a single device.

    Args:
      devices: what is trained on.
      steps: how long each bar is.

    Yields:
      What to call at every step, with whether it is the reference's, and its loss.
    """
    console = new_console(highlight=False)
    console.print(
        f"[bold]jaxcoll {jc.__version__}[/], JAX {jax.__version__}: handwritten digits over "
        f"{counted(len(devices), 'device')} ({devices[0].device_kind})\n"
    )
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        tasks = [
            progress.add_task(name, total=steps, loss="  –   ", start=False)
            for name in (f"jaxcoll, {counted(len(devices), 'device')}", "reference, 1 device")
        ]

        def advance(is_reference: bool, loss: float) -> None:
            task = tasks[is_reference]
            progress.start_task(task)
            progress.update(task, advance=1, loss=f"{loss:.4f}")

        yield advance


def show(outcome: Outcome, picture: Path) -> None:
    """Print the results, the plan, and what became of it."""
    console = new_console(highlight=False)
    console.print()
    console.print(_results(outcome))
    console.print()
    if outcome.plan.packs:
        console.print(_plan(outcome))
        console.print()
    console.print(_sent(outcome))
    for reason in outcome.plan.reasons:
        console.print(f"[dim]{reason}[/]")
    console.print()
    # Neither wrapped nor cropped, so that it can be copied.
    console.print(f"picture: {picture}", soft_wrap=True)


def _results(outcome: Outcome) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "test accuracy",
        Text(f"{outcome.accuracy:.4f}", "bold"),
        f"at least {LEAST_ACCURACY}; one device: {outcome.reference_accuracy:.4f}",
    )
    table.add_row(
        "largest relative difference",
        Text(f"{outcome.difference:.1e}", "bold"),
        f"at most {MOST_DIFFERENCE:.0e}; to one device's parameters",
    )
    return table


def _plan(outcome: Outcome) -> Table:
    arrays = counted(len(outcome.plan.packs), "array")
    table = Table(
        title=f"packing plan: {arrays}, {outcome.plan.nbytes:,} bytes",
        title_justify="left",
        title_style="bold",
    )
    *narrow, last = COLUMNS
    for column in narrow:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    for row in outcome.plan.rows():
        table.add_row(*(Text(cell) for cell in row))
    return table


def _sent(outcome: Outcome) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, traffic in (("requested", outcome.requested), ("compiled", outcome.compiled)):
        table.add_row(
            f"all-reduces {name}", Text(str(traffic.all_reduces), "bold"), _carries(traffic)
        )
    table.add_row(
        "wire bytes a step",
        Text(f"{outcome.wire_bytes:,}", "bold"),
        "leave each device, as compiled",
    )
    return table


def _carries(traffic: Traffic) -> str:
    """What a program's all-reduces carry, in words."""
    if not traffic.all_reduces:
        return "nothing to sum on one device"
    arrays = counted(traffic.operands, "array")
    return f"{arrays}, {traffic.bytes:,} bytes of {', '.join(traffic.dtypes)}"
