"""A plan as a table of HTML, as notebooks show it."""

from __future__ import annotations

import html as _html
from typing import TYPE_CHECKING

from jaxcoll._plan.plan_text import COLUMNS

if TYPE_CHECKING:
    from jaxcoll._plan.plan import Plan

MOST = 40
"""Rows; the rest are counted."""

_RIGHT = {"pack", "leaves", "bytes"}


def html(plan: Plan) -> str:
    """What `str(plan)` says, in the colours of the page that it stands in."""
    rows = plan.rows()
    body = "".join(_row("td", row) for row in rows[:MOST])
    if len(rows) > MOST:
        body += f"<tr><td colspan='{len(COLUMNS)}'>… and {len(rows) - MOST:,} more</td></tr>"
    table = f"<table><thead>{_row('th', COLUMNS)}</thead><tbody>{body}</tbody></table>"
    table = table if rows else ""
    said = "".join(f"<div>{_html.escape(line)}</div>" for line in plan.reasons)
    return (
        f"<div><p><b>{_html.escape(plan.headline)}</b></p>{said}"
        f"<div style='opacity:.65'>{_html.escape(plan.prediction)}</div>{table}</div>"
    )


def _row(tag: str, cells: tuple[str, ...]) -> str:
    return (
        "<tr>"
        + "".join(
            f"<{tag} style='text-align:{'right' if name in _RIGHT else 'left'}'>"
            f"{_html.escape(cell)}</{tag}>"
            for name, cell in zip(COLUMNS, cells, strict=True)
        )
        + "</tr>"
    )
