"""A plan as text: why it is so, what it takes, and a table of what travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcoll._plan.plan import Plan

COLUMNS = ("pack", "dtype", "algorithm", "leaves", "bytes", "carries")
MOST = 20
"""Rows that `str(plan)` shows; the rest are counted."""


def text(plan: Plan, most: int | None = None) -> str:
    """What is reduced, why it is done so, what it is predicted to take, and a table.

    Args:
      plan: what to show.
      most: rows of the table; None: all.
    """
    rows = plan.rows()
    shown = rows if most is None or len(rows) <= most else rows[: most - 1]
    table = [COLUMNS, *shown]
    widths = [max(len(row[c]) for row in table) for c in range(5)]
    lines = [
        "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[5]])
        for row in table
    ]
    if len(shown) < len(rows):
        more = len(rows) - len(shown)
        lines.append(f"… and {more:,} more: `plan.text()`, or --all-rows, shows them")
    return "\n".join([plan.headline, *plan.reasons, plan.prediction, *lines])
