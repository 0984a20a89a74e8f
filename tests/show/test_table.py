"""A table aligns its cells, and escapes them where it is HTML."""

from jaxcoll._show.table import Table, folding_html, lines_html

TABLE = Table(("#", "what"), "><", [("1", "a"), ("22", "<b>")], ["", "beneath"], "… and 3 more")


def test_as_text():
    assert TABLE.text() == " #  what\n 1  a\n22  <b>\n    beneath\n… and 3 more"
    assert TABLE.text(width=6) == " #  w…\n 1  a\n22  <…\n    b…\n… and 3 more"


def test_no_number_is_cut():
    table = Table(("leaf", "bytes", "of"), "<>>", [("w", "1,024", "2,048")])
    assert table.text(17) == "leaf  bytes  …\nw     1,024  …"
    assert table.text(18) == "leaf  bytes     of\nw     1,024  2,048"


def test_as_html():
    html = TABLE.html()
    assert "<td style='text-align:right'>22</td><td style='text-align:left'>&lt;b&gt;</td>" in html
    assert "<tr><td></td><td colspan='1' style='text-align:left;opacity:.65'>beneath</td>" in html
    assert html.count("<tbody>") == len(TABLE.rows), "a row is sorted with the line beneath it"
    assert html.endswith("<tfoot><tr><td colspan='2'>… and 3 more</td></tr></tfoot></table>")
    assert folding_html("a<b", html) == f"<details open><summary>a&lt;b</summary>{html}</details>"
    assert lines_html(["a<b", "c"]) == "<div>a&lt;b</div><div>c</div>"
