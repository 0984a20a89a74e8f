"""Values as text for people, in tables, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxcoll._show.units import fold, shorten


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
        """Align the table, with lines of at most `width` characters, the rest cut off.

        Numbers are not cut: the widest column after the second moves beneath, until they fit.
        """
        columns, moved = [*range(len(self.columns))], list[int]()
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        while width is not None and len(columns) > 2 and self._end(columns, widths) > width:
            moved.append(max(columns[2:], key=lambda k: (widths[k], k)))
            columns.remove(moved[-1])
        indent, lines = " " * (widths[0] + 2), []
        beneath = ["", *(self.below or [""] * len(self.rows))]
        for cells, last in zip([self.columns, *self.rows], beneath, strict=True):
            padded = (f"{cells[k]:{self.align[k]}{widths[k]}}" for k in columns)
            lines.append("  ".join(padded).rstrip())
            if moved and cells is not self.columns:
                text = "; ".join(f"{self.columns[k]}: {cells[k]}" for k in sorted(moved))
                # On a narrow terminal, lines that are cut off say more than words broken every few
                # letters.
                room = max((width or 0) - len(indent), 20)
                lines += [indent + line for line in fold(text, room).split("\n")]
            lines += [indent + last] if last else []
        lines = lines if width is None else [shorten(line, width) for line in lines]
        return "\n".join([*lines, self.more] if self.more else lines)

    def _end(self, columns: Sequence[int], widths: Sequence[int]) -> int:
        """Find where the last column of numbers ends; it has room for the start of the next."""
        numbers = [n for n, k in enumerate(columns) if self.align[k] == ">" and n]
        last = max(numbers, default=0)
        end = sum(widths[k] for k in columns[: last + 1]) + 2 * last
        # Two spaces, and one character that shows that a text begins there.
        return end + 3 * (last + 1 < len(columns)) if numbers else 0


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
