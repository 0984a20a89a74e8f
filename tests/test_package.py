"""What a person who installs jaxcoll gets: a typed wheel, and a light import."""

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


def python(code: str, **environment: str) -> str:
    """Run `code` in a Python of its own, with warnings as errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_costs_less_than_a_second_beyond_jax():
    code = (
        "import time, jax; start = time.process_time(); import jaxcoll; "
        "print(time.process_time() - start)"
    )
    assert any(float(python(code)) < 1.0 for _ in range(3))


def test_import_brings_in_nothing_optional_and_leaves_the_backend_alone():
    # JAX refuses to change the number of CPU devices once a backend exists.
    code = (
        "import sys, jax, jaxcoll; "
        "print(*sorted({'rich', 'matplotlib', 'optax', 'sklearn', 'chex'} & set(sys.modules))); "
        "jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    assert python(code, XLA_FLAGS="") == "3"


def test_every_public_name_is_in_the_reference():
    public = {
        name
        for name, value in vars(jaxcoll).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    page = (REPOSITORY / "docs" / "face.md").read_text(encoding="utf-8")
    assert public == set(re.findall(r"^::: jaxcoll\.(\w+)$", page, re.MULTILINE))


@pytest.mark.slow
def test_wheel_is_typed_and_complete_and_imports_by_itself():
    names, metadata = built().names, built().metadata
    sources = {
        str(path.relative_to(REPOSITORY).as_posix())
        for path in (REPOSITORY / "jaxcoll").rglob("*")
        if path.suffix in (".py", ".toml") or path.name == "py.typed"
    }
    assert "jaxcoll/py.typed" in names
    assert {n for n in names if ".dist-info/" not in n} == sources
    assert metadata["Version"] == jaxcoll.__version__
    needs = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(needs) == ["jax>=0.10", "jaxlib>=0.10", "numpy"]

    imported = python("import jaxcoll; print(jaxcoll.__file__)", PYTHONPATH=str(built().site))
    assert Path(imported).is_relative_to(built().site)


@pytest.mark.slow
def test_what_a_package_index_reads_of_the_wheel_is_complete():
    metadata = built().metadata
    assert metadata["Name"] == "jaxcoll"
    assert metadata["Summary"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# jaxcoll")
    assert set(metadata.get_all("Classifier")) <= trove_classifiers.classifiers
    assert any(name.endswith("licenses/LICENSE") for name in built().names)


@pytest.mark.slow
def test_the_source_archive_has_what_a_packager_needs_and_nothing_else():
    with tarfile.open(built().sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "tests/conftest.py",
        "uv.lock",
    }
    assert needed | {"docs/start.md", "mkdocs.yml", "Makefile"} <= names
    tops = {name.partition("/")[0] for name in names}
    known = {
        *"jaxcoll tests docs notebooks PKG-INFO CONTRIBUTING.md .gitignore".split(),
        *tops & needed,
    }
    assert tops <= known | {"mkdocs.yml", "Makefile", "uv.lock"}


def test_the_version_is_one():
    cited = (REPOSITORY / "docs" / "CITATION.cff").read_text("utf8")
    assert re.search(r"^version: (.+)$", cited, re.M)[1] == jaxcoll.__version__
