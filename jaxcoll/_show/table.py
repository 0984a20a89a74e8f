"""Rows under named columns, as text and as HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape

from jaxcoll._show.units import shortened

# The table's own script: right-aligned columns hold numbers with decimal prefixes, a second click
# turns the order round. Where a page allows no script, the table stays as it is.
_SORT = """
const head = event.target.closest("th"), table = this.parentNode, column = head.cellIndex;
const turned = table.dataset.by == column ? -1 : 1;
table.dataset.by = turned > 0 ? column : -1;
const text = body => body.rows[0].cells[column].textContent;
const number = body => {
  const [, digits, prefix] = text(body).match(/^([0-9.,]+) ?([kMGTPE]?)/) ?? [, "-1", ""];
  return digits.replaceAll(",", "") * 1000 ** (1 + "kMGTPE".indexOf(prefix || "none"));
};
const order = head.style.textAlign == "right"
  ? (a, b) => number(a) - number(b)
  : (a, b) => text(a).localeCompare(text(b), "en", {numeric: true});
this.after(...[...table.tBodies].sort((a, b) => turned * order(a, b)));
""".replace("\n", " ").strip()


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text that is built already; it only aligns and escapes.

    Examples:
      >>> print(Table(("pack", "carries"), "><", [("0", "['w']"), ("12", "['b']")]).text())
      pack  carries
         0  ['w']
        12  ['b']
    """

    columns: tuple[str, ...]  # the names above them
    align: str  # a character for each column, "<" for left and ">" for right
    rows: Sequence[Sequence[str]]  # the cells of each row, one for each column
    # For each row, a line beneath it that spans all columns but the first; "" for none
    below: Sequence[str] = ()
    more: str = ""  # a last line, which says what is left out; "" for none

    def text(self, width: int | None = None) -> str:
        """The table in columns; lines longer than `width` end in "…", but never amid a number."""
        table = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for k in range(1, len(widths)):
            end = sum(widths[: k + 1]) + 2 * k + 3 * (k + 1 < len(widths))
            if width is not None and self.align[k] == ">" and end > width:
                widths, table = widths[:k], [[*cells[:k], "…"] for cells in table]
                break
        indent = " " * (widths[0] + 2)
        lines = []
        for cells, beneath in zip(table, ["", *self._below], strict=True):
            padded = map("{:{}{}}".format, cells, self.align, [*widths, 0])
            lines.append("  ".join(padded).rstrip())
            lines += [indent + beneath] if beneath else []
        lines = lines if width is None else [shortened(line, width) for line in lines]
        return "\n".join([*lines, self.more] if self.more else lines)

    def html(self) -> str:
        """The table as HTML, in the colours of the page that it stands in.

        A click on a column's name, or Enter on it, sorts by it; a row and the line beneath it are
        one `tbody`.
        """
        body = []
        for cells, beneath in zip(self.rows, self._below, strict=True):
            spanned = _spanning(len(self.align) - 1, beneath, "text-align:left;opacity:.65")
            below = f"<tr><td></td>{spanned}</tr>" if beneath else ""
            body.append(f"<tbody>{self._row('td', cells)}{below}</tbody>")
        foot = f"<tfoot><tr>{_spanning(len(self.align), self.more)}</tr></tfoot>" * bool(self.more)
        enter = 'if (event.key == "Enter") event.target.click()'
        head = f"<thead style='cursor:pointer' title='sort' onclick='{_SORT}' onkeydown='{enter}'>"
        return f"<table>{head}{self._row('th', self.columns)}</thead>{''.join(body)}{foot}</table>"

    @property
    def _below(self) -> Sequence[str]:
        return self.below or [""] * len(self.rows)

    def _row(self, tag: str, cells: Iterable[str]) -> str:
        sides = ("right" if side == ">" else "left" for side in self.align)
        focus = " tabindex='0'" if tag == "th" else ""
        found = "".join(
            f"<{tag}{focus} style='text-align:{side}'>{escape(cell)}</{tag}>"
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{found}</tr>"


def _spanning(columns: int, cell: str, style: str = "") -> str:
    styled = f" style='{style}'" if style else ""
    return f"<td colspan='{columns}'{styled}>{escape(cell)}</td>"


def folding_html(title: str, inside: str) -> str:
    """Markup under a title that a click folds away."""
    return f"<details open><summary>{escape(title)}</summary>{inside}</details>"


def lines_html(lines: Iterable[str], style: str = "") -> str:
    """Each line in a block of its own."""
    styled = f" style='{style}'" if style else ""
    return "".join(f"<div{styled}>{escape(line)}</div>" for line in lines)
