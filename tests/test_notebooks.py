"""The notebooks run from top to bottom, as they stand but for how much they train."""

import json
import shutil
from pathlib import Path

import forks
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SHORTER = {
    "05_sharding_parameters.ipynb": {"LAYERS, WIDTH = 8, 256": "LAYERS, WIDTH = 8, 64"},
    "06_compression.ipynb": {
        "STEPS, EVERY = 300, 30": "STEPS, EVERY = 22, 11",
        "range(1, 51)": "range(1, 3)",
        "50)": "2)",
        r"in (\"int8\", \"int4\")": r"== \"int4\"",
    },
}
SHELL = """
import json, sys, warnings
import matplotlib
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

class Shell(InteractiveShell):
    "As a kernel's, which an error of a cell ends, or of what shows a result."
    def enable_gui(self, gui=None): ...
    def showtraceback(self, *args, **kwargs):
        super().showtraceback(*args, **kwargs)
        sys.exit(1)

warnings.resetwarnings()
shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
matplotlib.use("module://matplotlib_inline.backend_inline")
for cell in json.load(open(sys.argv[0])):
    shell.run_cell(cell).raise_error()
"""


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_runs(path, tmp_path):
    pytest.importorskip("IPython")
    text = path.read_text("utf8")
    assert "__file__" not in text, "is of an editable install only"
    for long, short in SHORTER.get(path.name, {}).items():
        assert long in text
        text = text.replace(long, short)
    cells = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    (tmp_path / "cells").write_text(json.dumps(["".join(cell) for cell in cells]))
    # What stands beside a notebook comes with it; the package may be installed from a wheel.
    shutil.copytree(path.parent / "schedules", tmp_path / "schedules")
    done = forks.with_commands().run(SHELL, "cells", cwd=tmp_path, IPYTHONDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
