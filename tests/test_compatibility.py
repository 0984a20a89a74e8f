"""The table of runs in docs/compatibility.md is what its program writes."""

import platform

import compatibility
import jax
from compatibility import HEAD, PAGE, TABLE, row, with_row

REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.plan.test_plan" name="a"/>
<testcase classname="tests.plan.test_plan" name="b"><failure/></testcase>
<testcase classname="tests.test_cli" name="c"><skipped/></testcase>
<testcase classname="tests.test_cli" name="d"/>
</testsuite></testsuites>
"""


def test_a_run_is_a_row(tmp_path):
    (tmp_path / "suite.xml").write_text(REPORT)
    cells = [cell.strip() for cell in row(tmp_path / "suite.xml").strip("|\n").split("|")]
    assert (cells[0], cells[3]) == (jax.__version__, platform.python_version())
    assert cells[5].startswith("2 of ")
    assert cells[6:] == ["2", "1", "1"]


def test_a_run_replaces_that_of_the_same_versions_and_stands_in_order():
    old, new, other = (
        f"| {v} | {v} | 2.4 | {p} | Linux x86_64 | {n} of 9 | 1 | 0 | 0 |\n"
        for v, p, n in (("0.12.0", "3.13.1", 1), ("0.12.0", "3.13.2", 5), ("0.9.2", "3.11.1", 2))
    )
    page = f"before\n\n{HEAD}{old}\nafter\n"
    assert with_row(page, new) == f"before\n\n{HEAD}{new}\nafter\n"
    assert with_row(page, other) == f"before\n\n{HEAD}{other}{old}\nafter\n"


def test_the_page_has_one_table_of_runs_in_which_none_failed():
    (rows,) = TABLE.findall(PAGE.read_text("utf8"))
    assert rows
    assert all(each.split("|")[-2].strip() == "0" for each in rows.splitlines())
    assert PAGE.read_text("utf8") == compatibility.with_row(
        PAGE.read_text("utf8"), rows.splitlines(keepends=True)[0]
    )
