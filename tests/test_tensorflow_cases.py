"""Every case of TensorFlow's that the page says is held is held by a test that is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS / "tensorflow_cases.md").read_text("utf8")


def table(title):
    """The rows of each line of a table."""
    lines = re.search(rf"^## {title}\n\n\|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)[1].splitlines()
    return [row for line in lines for row in line.strip("| ").split(" | ")[0].split(", ")]


def marked_rows():
    """The arguments of `@pytest.mark.tensorflow` of every test."""
    return {
        row.value
        for path in TESTS.rglob("test_*.py")
        for test in ast.walk(ast.parse(path.read_text("utf8")))
        if isinstance(test, ast.FunctionDef)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.tensorflow"
        for row in mark.args
    }


def test_every_row_has_its_test():
    passes, differs, meaningless = tables = [
        table(f"What {title}")
        for title in ("passes", "differs on purpose", "has no meaning in JAX")
    ]
    assert {*passes, *differs} == marked_rows()
    every = [*passes, *differs, *meaningless]
    assert len(set(every)) == len(every)
    counts = re.search(r"Of (\d+) .* (\d+) pass, (\d+) differ .*?(\d+) have no m", PAGE, re.S)
    assert [*map(int, counts.groups())] == [len(every), *map(len, tables)]
