"""What the demo shows in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from rich.table import Table
from rich.text import Text

import jaxcoll as jc
from jaxcoll._show.units import counted
from jaxcoll.bench.terminal import new_console, progress_bars
from jaxcoll.demos.demonstration import (
    LEAST_ACCURACY,
    MOST_DIFFERENCE,
    Outcome,
    Traffic,
    kinds_in_words,
)


@contextlib.contextmanager
def progress(
    devices: Sequence[jax.Device], steps: int, *, to_stderr: bool
) -> Iterator[Callable[[bool, float], None]]:
    """Bars of both trainings; yields what to call at a step: is it the reference, and its loss."""
    console = new_console(stderr=to_stderr, highlight=False)
    count, processes = counted(len(devices), "device"), jax.process_count()
    count += f" in {processes} processes" * (processes > 1)
    console.print(
        f"[bold]jaxcoll {jc.__version__}[/], JAX {jax.__version__}: handwritten digits over "
        f"{count} ({devices[0].device_kind})\n"
    )
    names = (f"jaxcoll, {count}", "reference, 1 device")
    with progress_bars(console, names, steps) as advance:
        yield lambda is_reference, loss: advance(names[is_reference], f"loss {loss:.4f}")


def show(outcome: Outcome, picture: Path, *, to_stderr: bool) -> None:
    """Print the results, the plan, and what was sent."""
    console = new_console(stderr=to_stderr, highlight=False)
    accuracy = f"at least {LEAST_ACCURACY}; one device: {outcome.test_accuracy_one_device:.4f}"
    difference = f"at most {MOST_DIFFERENCE:.0e}; to one device's parameters"
    trained = _figures(
        ("test accuracy", f"{outcome.test_accuracy:.4f}", accuracy),
        ("largest relative difference", f"{outcome.largest_relative_difference:.1e}", difference),
    )
    sent = _figures(
        ("requested", *_in_words(outcome.requested)),
        ("compiled", *_in_words(outcome.compiled)),
        ("wire bytes a step", f"{outcome.wire_bytes_per_step:,}", "leave each device, as compiled"),
    )
    for part in (trained, Text(str(outcome.plan)), sent, f"picture: {picture}"):
        console.print()
        # Neither wrapped nor cropped, so that it can be copied.
        console.print(part, soft_wrap=not isinstance(part, Table))


def _figures(*rows: tuple[str, str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, figure, remark in rows:
        table.add_row(name, Text(figure, "bold"), remark)
    return table


def _in_words(traffic: Traffic) -> tuple[str, str]:
    """A program's collectives, and what they carry."""
    if not traffic.kinds:
        return kinds_in_words(traffic), "nothing to sum on one device"
    carried = f"{counted(traffic.operands, 'array')}, {traffic.bytes:,} bytes"
    return kinds_in_words(traffic), f"{carried} of {', '.join(traffic.dtypes)}"
