"""What the pages show is what happens: every Python block is run, every docstring example too."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxcoll

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python\n" in page.read_text()
]
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(jaxcoll.__path__, "jaxcoll.")
    # Ranks of other libraries run in interpreters that have these.
    if not m.name.endswith(("__main__", ".torch_rank", ".tensorflow_rank"))
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    script = tmp_path / f"{page.stem}.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True,
        timeout=240, env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_report_that_a_page_shows_is_what_its_code_prints(tmp_path):
    page = (ROOT / "docs/reading_a_report.md").read_text()
    code, shown = (
        re.search(f"^```{kind}\n(.*?)^```", page, re.M | re.S)[1] for kind in ("python", "text")
    )
    # A file, because Python from 3.13 on finds the lines of `-c` as well, and older ones do not.
    (tmp_path / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": "", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # What differs from machine to machine is left out, by "…".
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), done.stdout), done.stdout


def test_the_code_of_the_pages_needs_what_the_documented_install_brings():
    brought = {*sys.stdlib_module_names, "jax", "jaxcoll", "numpy", "optax"}  # .[cli,train]
    for page in PAGES:
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
        imports = re.findall(r"^ *(?:import|from) (\w+)", code, re.M)
        assert set(imports) <= brought, page.name


def test_there_are_pages_with_code():
    assert {"README.md", "index.md", "sharp_bits.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name):
    module = importlib.import_module(name)
    names = {k: getattr(jaxcoll, k) for k in dir(jaxcoll) if not k.startswith("_")}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = doctest.testmod(module, extraglobs=names)
    assert result.failed == 0
