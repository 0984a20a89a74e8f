"""A table aligns its cells, and cuts no number."""

from jaxcoll._show.table import Table

TABLE = Table(("#", "what"), "><", [("1", "a"), ("22", "<b>")], ["", "beneath"], "… and 3 more")


def test_as_text():
    assert TABLE.text() == " #  what\n 1  a\n22  <b>\n    beneath\n… and 3 more"
    assert TABLE.text(width=6) == " #  w…\n 1  a\n22  <…\n    b…\n… and 3 more"


def test_no_number_is_cut():
    table = Table(("leaf", "bytes", "of"), "<>>", [("w", "1,024", "2,048")])
    assert table.text(17) == "leaf  bytes\nw     1,024\n      of: 2,048"
    assert table.text(18) == "leaf  bytes     of\nw     1,024  2,048"
