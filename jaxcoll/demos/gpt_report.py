"""What `jaxcoll demo gpt` shows in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxcoll as jc
from jaxcoll._observe.report_text import size
from jaxcoll.bench.terminal import new_console
from jaxcoll.demos import gpt
from jaxcoll.demos.demonstration import counted
from jaxcoll.demos.gpt_demo import Outcome
from jaxcoll.demos.gpt_training import MODES


@contextlib.contextmanager
def progress_bars(
    devices: list[jax.Device], names: list[str], steps: int
) -> Iterator[Callable[[str, float], None]]:
    """A bar for each training, that on one device first.

    Args:
      devices: what is trained on.
      names: of the modes.
      steps: how long each bar is.

    Yields:
      What to call at every step, with the name and the loss.
    """
    console = new_console(highlight=False)
    console.print(
        f"[bold]jaxcoll {jc.__version__}[/], JAX {jax.__version__}: a GPT of "
        f"{gpt.LAYERS} layers learns Python's standard library over "
        f"{counted(len(devices), 'device')} ({devices[0].device_kind})\n"
    )
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(name, total=steps, loss="  –   ", start=False)
            for name in ("one device", *names)
        }

        def advance(name: str, loss: float) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], advance=1, loss=f"{loss:.4f}")

        yield advance


def show(outcome: Outcome, picture: Path) -> None:
    """Print a row for each mode."""
    console = new_console(highlight=False)
    table = Table(
        title=f"{outcome.parameters:,} parameters, {counted(outcome.steps, 'step')} of "
        f"{counted(outcome.texts, 'text')}; one device's last loss: "
        f"{outcome.reference.losses[-1]:.4f}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("mode", style="bold")
    for column in ("last loss", "differs by", "runs", "wire bytes", "state bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for name, trained in outcome.modes.items():
        assert trained.report is not None, "what runs on several devices was inspected"
        table.add_row(
            name,
            f"{trained.losses[-1]:.4f}",
            f"{outcome.difference(name):.0e}",
            f"{trained.report.runs}",
            size(trained.report.wire_bytes),
            size(trained.state_bytes),
            MODES[name].says,
        )
    console.print()
    console.print(table)
    one = size(outcome.reference.state_bytes)
    console.print(
        "[dim]differs by: the largest relative difference of any step's loss to one device's · "
        "runs: collectives of a step, as compiled · wire bytes: that leave each device in a step · "
        f"state bytes: of the optimizer on each device; without jaxcoll {one}[/]"
    )
    # Neither wrapped nor cropped, so that it can be copied.
    console.print(f"picture: {picture}", soft_wrap=True)
