"""The notebooks run from top to bottom, as they stand but for how long they train."""

import shutil
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SHORTER = {"06_less_on_the_wire.ipynb": ("STEPS, EVERY = 300, 30", "STEPS, EVERY = 60, 30")}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_runs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    text = path.read_text("utf8")
    if path.name in SHORTER:
        long, short = SHORTER[path.name]
        assert long in text
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    # What stands beside a notebook comes with it; the package may be installed from a wheel.
    shutil.copytree(path.parent / "schedules", tmp_path / "schedules")
    client(notebook, timeout=240, resources={"metadata": {"path": tmp_path}}).execute()
    assert all(
        "error" not in str(o.get("output_type"))
        for c in notebook.cells
        for o in c.get("outputs", [])
    )


def test_there_are_notebooks():
    assert NOTEBOOKS
    assert not any("__file__" in path.read_text() for path in NOTEBOOKS), "of an editable install"
