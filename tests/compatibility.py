"""Writes into docs/compatibility.md what ran where, from the report of a run of the tests.

With the interpreter whose versions are meant:

    python -m pytest --junitxml=suite.xml
    python tests/compatibility.py suite.xml
"""

import os
import platform
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import jax
import jaxlib
import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
HEAD = """\
| JAX | jaxlib | NumPy | Python | system | files of tests | passed | skipped | failed |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
FILE = re.compile(r".*?\btest_\w+")
"""A file of tests, of what may name a class in it as well."""
TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\|\n)*)")


def row(report: Path) -> str:
    """The row of one run: this interpreter's versions, and what the report counts."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    ended = [
        "failed" if {"failure", "error"} & kinds else "skipped" if "skipped" in kinds else "passed"
        for kinds in ({each.tag for each in case} for case in cases)
    ]
    modules = (FILE.match(case.get("file") or case.get("classname", "")) for case in cases)
    files = {module[0] for module in modules if module}
    every = sum(1 for _ in Path(__file__).parent.rglob("test_*.py"))
    cells = [
        *(jax.__version__, jaxlib.__version__, np.__version__, platform.python_version()),
        f"{platform.system()} {platform.machine()}",
        f"{len(files)} of {every}",
        *(f"{ended.count(kind):,}" for kind in ("passed", "skipped", "failed")),
    ]
    return f"| {' | '.join(cells)} |\n"


def with_row(page: str, new: str) -> str:
    """The page with a row in the place of that of the same JAX and Python, or below the others."""
    found = TABLE.search(page)
    assert found, "no table of runs"
    rows = {_key(old): old for old in found[1].splitlines(keepends=True)}
    rows[_key(new)] = new
    return (
        page[: found.start(1)] + "".join(rows[key] for key in sorted(rows)) + page[found.end(1) :]
    )


def _key(row: str) -> tuple[tuple[int, ...], str]:
    """JAX's version as numbers, and Python's without its last part."""
    cells = [cell.strip() for cell in row.strip("|\n").split("|")]
    return tuple(map(int, re.findall(r"\d+", cells[0]))), cells[3].rpartition(".")[0]


if __name__ == "__main__":
    PAGE.write_text(with_row(PAGE.read_text("utf8"), row(Path(sys.argv[1]))), "utf8")
    print(f"{os.path.relpath(PAGE)} has the row of JAX {jax.__version__}")
