"""Every case of TensorFlow's that the page says is held is held by a test that is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS / "tensorflow_cases.md").read_text("utf8")
NAMES = {
    node.name
    for path in TESTS.rglob("test_*.py")
    for node in ast.walk(ast.parse(path.read_text("utf8")))
    if isinstance(node, ast.FunctionDef)
}
# The rows that stand at the beginning of a test's name.
CARRIED = {
    row
    for name in NAMES
    if (found := re.match(r"test_((?:[A-L]\d+_)+)", name))
    for row in found[1].strip("_").split("_")
}


def table(title):
    """Of each line of a table its rows, and the tests in its last column."""
    lines = re.search(rf"^## {title}\n\n\|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)[1].splitlines()
    for line in lines:
        rows, *_, last = line.strip("| ").split(" | ")
        yield rows.split(", "), re.findall(r"`test_\w+`|\*numpy\*", last)


def test_a_case_that_passes_or_differs_is_held_by_a_test_that_is_there():
    passes, differs, has_no_meaning = tables = [
        [*table(f"What {title}")]
        for title in ("passes", "differs on purpose", "has no meaning in JAX")
    ]
    for rows, tests in passes + differs:
        missing = {test.strip("`") for test in tests} - NAMES - {"*numpy*"}
        assert not missing, f"{rows}: {missing} are not there"
        assert tests or set(rows) <= CARRIED, f"{rows}: held by no test"
    every = [row for lines in tables for rows, _ in lines for row in rows]
    assert len(set(every)) == len(every)
    assert set(every) - {row for rows, _ in has_no_meaning for row in rows} >= CARRIED
    said = re.search(r"Of (\d+) .* (\d+) pass, (\d+) differ .*?(\d+) have no m", PAGE, re.S)
    counts = [sum(len(rows) for rows, _ in lines) for lines in tables]
    assert [*map(int, said.groups())] == [len(every), *counts]
