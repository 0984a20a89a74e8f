"""What a person who installs jaxcoll gets: a typed wheel, and a light import."""

import json
import os
import re
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest
import trove_classifiers
from wheel import built

import jaxcoll

REPOSITORY = Path(jaxcoll.__file__).parents[1]


IMPORT = """
import json, sys, jax
import jaxcoll
facts = {"file": jaxcoll.__file__, "own": [x for x in sys.modules if x.startswith("jaxcoll")]}
getattr(jaxcoll, sys.argv[1])
from jaxcoll._collectives.scope import scope_here
# Whichever name is used first, a bare call has its world, formats their names, and errors no frames.
scope_here()
jaxcoll.CommunicationOptions(compression="int8")
assert "jaxcoll._compat.settings" in sys.modules
from jaxcoll import *
assert {name for name in dir(jaxcoll) if name[0] != "_"} <= {*globals()}
facts["optional"] = sorted({'rich', 'matplotlib', 'optax', 'sklearn', 'chex'} & set(sys.modules))
jax.config.update('jax_num_cpu_devices', 3)
print(json.dumps({**facts, "devices": jax.device_count()}))
"""


@pytest.mark.product
def test_import_is_light():
    # JAX refuses to change the number of CPU devices once a backend exists.
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(built().site)}
    command = [sys.executable, "-P", "-W", "error", "-c", IMPORT]
    for name in ("all_reduce", "sharded_optimizer"):
        done = subprocess.run(
            [*command, name],
            env={**os.environ, **variables}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        # Beyond JAX nothing that takes time: every other module comes with a name that is used.
        assert (facts["own"], facts["optional"], facts["devices"]) == (["jaxcoll"], [], 3)
        assert Path(facts["file"]).is_relative_to(built().site)


def public(module: types.ModuleType) -> set[str]:
    names = {name for name in dir(module) if not name.startswith("_")}
    return {name for name in names if not isinstance(getattr(module, name), types.ModuleType)}


def test_reference_lists_public_names():
    pages = sorted((REPOSITORY / "docs" / "reference").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    listed = re.findall(r"^::: jaxcoll\.((?:\w+\.)*\w+)$", text, re.MULTILINE)
    of_modules = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in (jaxcoll.compression, jaxcoll.distribute, jaxcoll.errors)
        for name in public(module) - public(jaxcoll)
    }
    assert {name for name in listed if not name.startswith("_")} == public(jaxcoll) | of_modules
    assert len(listed) == len(set(listed))
    assert len(public(jaxcoll)) <= 51


@pytest.mark.product
def test_wheel_is_complete():
    names, metadata = built().names, built().metadata
    sources = {
        str(path.relative_to(REPOSITORY).as_posix())
        for path in (REPOSITORY / "jaxcoll").rglob("*")
        if path.suffix in (".py", ".toml") or path.name == "py.typed"
    }
    assert "jaxcoll/py.typed" in names
    assert {n for n in names if ".dist-info/" not in n} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)
    needs = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(needs) == ["jax>=0.10", "jaxlib>=0.10", "numpy"]
    for field, value in {
        "Name": "jaxcoll", "Version": jaxcoll.__version__, "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.11", "Description-Content-Type": "text/markdown",
    }.items():  # fmt: skip
        assert metadata[field] == value
    assert metadata["Summary"]
    assert metadata.get_payload().startswith("# jaxcoll")
    assert set(metadata.get_all("Classifier")) <= trove_classifiers.classifiers


@pytest.mark.product
def test_sdist_is_complete():
    with tarfile.open(built().sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    needed = {"README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml", "Makefile", "uv.lock"}
    assert needed | {"pyproject.toml", "tests/conftest.py", "docs/start.md"} <= names
    others = "jaxcoll tests benchmarks docs notebooks PKG-INFO CONTRIBUTING.md .gitignore"
    assert tops <= needed | {"pyproject.toml", *others.split()}


def test_version_is_one():
    cited = (REPOSITORY / "docs" / "CITATION.cff").read_text("utf8")
    assert re.search(r"^version: (.+)$", cited, re.M)[1] == jaxcoll.__version__
