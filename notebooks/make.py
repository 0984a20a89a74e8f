"""Runs the notebooks anew and stores what they show; draws the pictures of the pages anew.

    python notebooks/make.py [01 02 03 04 05 06 report.png simulation.png ...]

Of 04 and of report.png it needs the compiler for GPUs (docs/clusters.md) and no GPU, and stops
without it rather than store what a reader would not see. What 03 draws comes from schedules/make.py.
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
_CELL = re.compile(r"(?:/[\w./-]*/ipykernel_\d+/|\b)\d{6,}\.py:")  # a cell's file, by chance


def store(name: str) -> None:
    """Run one notebook in a folder of its own, and keep its outputs."""
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
    shown = nbformat.writes(notebook)
    if "needs the compiler of GPUs" in shown:  # as `jc.inspect` says without it
        raise SystemExit(f"{name}: the compiler for GPUs is missing; see docs/clusters.md.")
    path.write_text(shown + "\n", encoding="utf-8")


def draw(name: str) -> None:
    """Draw one picture of the pages."""
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
