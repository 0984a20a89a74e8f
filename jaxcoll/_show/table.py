"""Values as text for people, in tables, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxcoll._show.units import shortened


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of strings, which `text` aligns.

    Examples:
      >>> print(Table(("pack", "carries"), "><", [("0", "['w']"), ("12", "['b']")]).text())
      pack  carries
         0  ['w']
        12  ['b']
    """

    columns: tuple[str, ...]  # the headings
    align: str  # a character for each column, "<" for left and ">" for right
    rows: Sequence[Sequence[str]]  # the cells of each row, one for each column
    # For each row, a line beneath it, from the second column on; "" for none
    below: Sequence[str] = ()
    more: str = ""  # a last line that says how much is left out; "" for none

    def text(self, width: int | None = None) -> str:
        """Return the aligned table; lines longer than `width` end in "…", never inside a number."""
        table = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for k in range(1, len(widths)):
            end = sum(widths[: k + 1]) + 2 * k + 3 * (k + 1 < len(widths))
            if width is not None and self.align[k] == ">" and end > width:
                widths, table = widths[:k], [[*cells[:k], "…"] for cells in table]
                break
        indent, below = " " * (widths[0] + 2), self.below or [""] * len(self.rows)
        lines = []
        for cells, beneath in zip(table, ["", *below], strict=True):
            padded = map("{:{}{}}".format, cells, self.align, [*widths, 0])
            lines.append("  ".join(padded).rstrip())
            lines += [indent + beneath] if beneath else []
        lines = lines if width is None else [shortened(line, width) for line in lines]
        return "\n".join([*lines, self.more] if self.more else lines)


class Shown:
    """A value that shows as its text, in a notebook too, and converts to plain values and JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the value as plain numbers and strings."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return `to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # Not `_repr_pretty_`: IPython prefers the `__repr__` of a dataclass that inherits it.
        text = str(self)
        # Scroll long lines: a notebook would break them.
        html = f"<pre style='white-space:pre;overflow-x:auto'>{escape(text)}</pre>"
        return {"text/plain": text, "text/html": html}
