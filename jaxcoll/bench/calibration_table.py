"""A calibration in the terminal: the terms beside the preset's, and what they foresee."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.cost.model import Prices
from jaxcoll._plan.cost.terms import Terms
from jaxcoll.bench.naming import spelled
from jaxcoll.bench.terminal import new_console

if TYPE_CHECKING:
    from jaxcoll.bench.calibrate import Calibrated

_UNITS = (("call", 1e6, "µs"), ("array", 1e6, "µs"), ("slice", 1e6, "µs"),
          ("reduce", 1e9, "ns/B"), ("copy", 1e9, "ns/B"))  # fmt: skip


def show(found: Calibrated, where: str, *, to_stderr: bool) -> None:
    """Print the terms, and the held-out tree.

    Args:
      found: what was measured.
      where: a sentence that says where it is kept.
      to_stderr: where standard output carries the file.
    """
    console = new_console(stderr=to_stderr, highlight=False, soft_wrap=True)
    table = Table(
        title=f"{found.terms.source}: medians of {found.rounds} rounds",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    table.add_column("term", no_wrap=True)
    for column in ("measured", "preset"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    measured, usual = (list(_rows(terms)) for terms in (found.terms, found.usual))
    for (name, value, unit), (_, before, _) in zip(measured, usual, strict=True):
        same = "as the preset has it" if value == before else ""
        table.add_row(name, f"{value:.3g}", f"{before:.3g}", f"{unit}  {same}")
    for size, t in found.terms.native[0].points:
        before = _native(found.usual, found.terms, size)
        table.add_row(f"native, {spelled(size)}", f"{t * 1e3:.3g}", f"{before * 1e3:.3g}", "ms")
    console.print(table)
    off = found.predicted / found.measured - 1
    console.print(
        f"Held out, {found.held_out} by auto: predicted {found.predicted * 1e3:.3g} ms, measured "
        f"{found.measured * 1e3:.3g} ms ({off:+.0%})."
    )
    console.print(Text(where))


def _rows(terms: Terms) -> Iterator[tuple[str, float, str]]:
    """Name, number and unit of each term."""
    for name, scale, unit in _UNITS:
        yield name, getattr(terms, name) * scale, unit
    for name in ("within", "between"):
        link = getattr(terms, name)
        yield f"{name}.step", link.step * 1e6, "µs"
        yield f"{name}.per_byte", link.per_byte * 1e9, "ns/B"


def _native(usual: Terms, found: Terms, nbytes: int) -> float:
    """What the preset says of the backend's own all-reduce of one array."""
    sizes = (found.key.replicas,)
    return Prices(usual, sizes).of(stages("native", 0, sizes), nbytes).seconds
