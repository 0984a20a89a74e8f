"""The table of everyday tasks: each task is done, and takes as many lines as the table says."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.product
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "peers" / "everyday"
LIBRARIES = ("ours", "plain", "ddp", "accelerated")
PAGE = (ROOT / "docs" / "jit_or_jaxcoll.md").read_text("utf8")
TASKS = {
    name: [cell.strip() for cell in cells.split("|")]
    for name, cells in re.findall(r"^\| .*?<!-- (\w+) --> \|(.*)\|$", PAGE, re.M)
}


@pytest.fixture(scope="module")
def everyday():
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in ("problem", "ours", "plain")}
    finally:
        sys.path.remove(str(FOLDER))


def lines(library):
    """Of each task's function: lines of its body that hold code."""
    tree = ast.parse((FOLDER / f"{library}.py").read_text("utf8"))
    text = (FOLDER / f"{library}.py").read_text("utf8").splitlines()
    return {
        f.name: sum(bool(line.strip()) for line in text[f.lineno : f.end_lineno])
        for f in tree.body
        if isinstance(f, ast.FunctionDef) and f.name not in ("loss", "run")
    }


def test_table_counts_lines():
    counted = [lines(library) for library in LIBRARIES]
    assert set(TASKS) == set(counted[0]) | set(counted[1])
    assert {task: [str(each.get(task, "–")) for each in counted] for task in TASKS} == TASKS


@pytest.mark.parametrize(
    ("library", "task"), [(name, task) for name in ("ours", "plain") for task in lines(name)]
)
def test_task_is_done(library, task, everyday):
    problem, module = everyday["problem"], everyday[library]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if task == "what_is_sent":
            of_all = jax.shard_map(
                lambda x: jax.lax.pmean(x.sum(), "data"),
                mesh=everyday["plain"].MESH, in_specs=P("data"), out_specs=P(),
            )  # fmt: skip
            assert module.what_is_sent(jax.jit(of_all), problem.X) == 1
            return
        x = problem.X.copy()
        if task == "skip_not_finite":
            x[1, 0] = np.inf
        rest = [problem.REAL] if task == "uneven_rows" else []
        problem.check(getattr(module, task)(problem.W, x, problem.Y, *rest), task)


@pytest.mark.processes
@pytest.mark.parametrize(("library", "needs"), [("ddp", "torch"), ("accelerated", "accelerate")])
def test_task_in_other_library(library, needs):
    pytest.importorskip(needs)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*run, FOLDER / f"{library}.py"], cwd=FOLDER, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
