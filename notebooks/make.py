"""Run the notebooks and store their outputs; redraw the pictures of the pages.

    python notebooks/make.py [01 02 03 04 05 06 report.png simulation.png ...]

Notebook 04 and report.png need the compiler for GPUs (docs/clusters.md), but no GPU. Without it the
script stops and stores no incomplete output. Notebook 03 uses files from schedules/make.py.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "docs" / "examples"), str(HERE.parent)]
from benchmarks import simulation
from jaxcoll.cli.main import main

IMAGES = HERE.parent / "docs" / "images"
STORED = sorted(path.stem for path in HERE.glob("*.ipynb"))
PICTURES = {
    "report.png": (main, ["inspect", "transformer:example", "--topology", "h100:8"]),
    "simulation.png": (simulation.main, []),
}
_CELL = re.compile(r"(?:/[\w./-]*/ipykernel_\d+/|\b)\d{6,}\.py:")  # a cell's random file name


def store(name: str) -> None:
    """Run one notebook in a temporary folder, and store its outputs."""
    path = HERE / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE / "schedules", Path(folder) / "schedules")
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = _CELL.sub("cell.py:", output["text"])
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = _CELL.sub("cell.py:", data)
    text = nbformat.writes(notebook)
    if "needs the compiler of GPUs" in text:  # the message of `jc.inspect`
        raise SystemExit(f"{name}: the compiler for GPUs is missing; see docs/clusters.md.")
    path.write_text(text + "\n", encoding="utf-8")


def draw(name: str) -> None:
    """Redraw one picture of the pages."""
    command, flags = PICTURES[name]
    if command([*flags, "--plot", str(IMAGES / name)]) == 2:
        raise SystemExit(2)


if __name__ == "__main__":
    asked = sys.argv[1:] or [*(name[:2] for name in STORED), *PICTURES]
    for each in asked:
        print(each, flush=True)
        if each in PICTURES:
            draw(each)
        else:
            store(next(name for name in STORED if name.startswith(each)))
