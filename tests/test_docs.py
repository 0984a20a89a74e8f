"""What the pages show is what happens: every Python block is run, every docstring example too."""

import ast
import doctest
import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path

import forks
import jax
import pytest
from wheel import built

import jaxcoll

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").glob("*.md"))
EVERY = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *SITE]
PAGES = [
    page for page in EVERY if page.name != "CHANGELOG.md" and "```python\n" in page.read_text()
]
SOURCES = {path: path.read_text("utf8") for path in sorted((ROOT / "jaxcoll").rglob("*.py"))}
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
MOST_WORDS = 20_000  # in all; 1,340 of them are not on the site
PROMISES = r"\b(not yet|in this release|coming soon|will be (?:added|supported)|TODO|roadmap)\b"
OLD_WORDS = r"\b(crew|muster|told|come home|out of breath|left behind|sign of life|stop here|Law:)"
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(jaxcoll.__path__, "jaxcoll.")
    if not m.name.endswith("__main__")
)


FROM_THE_WHEEL = """
import os
import jaxcoll
assert jaxcoll.__file__.startswith(os.environ["PYTHONPATH"]), jaxcoll.__file__
"""
AS_USERS_COMPILE = """
import jax
jax.config.update("jax_disable_most_optimizations", False)
"""


@pytest.fixture(scope="module")
def python():
    """What has only the wheel, and compiles as the tests do."""
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(built().site), "PATH": "", "PYTHONUTF8": "1"}
    quick = {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    return forks.Python(("jaxcoll",), own | quick)


@pytest.mark.product
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, python):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    code = code.replace("range(400)", "range(4)")  # steps of the README
    (tmp_path / "page.py").write_text(code + FROM_THE_WHEEL)
    done = python.run(forks.SCRIPT, "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.product
def test_the_report_that_a_page_shows_is_what_its_code_prints(tmp_path, python):
    page = (ROOT / "docs/reading_a_report.md").read_text()
    code, shown = (
        re.search(f"^```{kind}\n(.*?)^```", page, re.M | re.S)[1] for kind in ("python", "text")
    )
    # A file, because Python from 3.13 on finds the lines of `-c` as well, and older ones do not.
    (tmp_path / "train.py").write_text(code)
    as_users_do = AS_USERS_COMPILE + forks.SCRIPT
    done = python.run(as_users_do, "train.py", cwd=tmp_path, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    # What differs from machine to machine is left out, by "…".
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), done.stdout), done.stdout


@pytest.mark.product
def test_the_table_of_the_readme_is_what_its_command_prints(tmp_path, python):
    readme = (ROOT / "README.md").read_text("utf8")
    code, shown = (
        re.search(f"^```{kind}\n(.*?)^```", readme, re.M | re.S)[1] for kind in ("python", "text")
    )
    command = re.search(r"^jaxcoll (inspect .*?train\.py)", readme, re.M)[1].split()
    (tmp_path / "train.py").write_text(code)
    as_users_do = AS_USERS_COMPILE + forks.COMMAND
    done = python.run(as_users_do, "jaxcoll", *command, cwd=tmp_path, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    columns, row, place = (line.split() for line in shown.splitlines())
    table = [line.split() for line in done.stderr.splitlines()]
    begin = table.index(columns)
    name, _, *sent = row[:-4]  # Python 3.12 counts calls; times differ from run to run
    assert table[begin + 1][0] == name, done.stderr
    assert table[begin + 1][2 : 2 + len(sent)] == sent, done.stderr
    assert table[begin + 2] == place, done.stderr


def test_the_code_of_the_pages_needs_what_the_documented_install_brings():
    brought = {*sys.stdlib_module_names, "jax", "jaxcoll", "numpy", "optax"}  # .[cli,train]
    modules = {"dm-haiku": "haiku", "orbax-checkpoint": "orbax"}
    for page in PAGES:
        text = page.read_text("utf8")
        line = re.search(r"`pip install ([\w -]+)`", text)  # what this page alone needs
        needed = {modules.get(name, name) for name in line[1].split()} if line else set()
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
        imports = re.findall(r"^ *(?:import|from) (\w+)", code, re.M)
        assert set(imports) <= brought | needed, page.name


def anchors(page):
    """The anchors of a page's headings, as the site makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf8")), re.M)
    kept = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    return {re.sub(r"[\s-]+", "-", head) for head in kept}


@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.name)
def test_what_a_page_links_to_and_names_is_there(page):
    text = page.read_text("utf8")
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), link
            assert not anchor or anchor in anchors(there), link
    for path in re.findall(r"(?<![\w/.-])(?:jaxcoll|tests|notebooks|docs)/[\w./]*\w", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (tests[.\w]+)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    if page.name != "CHANGELOG.md":
        public = set(re.findall(r"\bjc\.(\w+)", text))
        assert public <= set(dir(jaxcoll)), public - set(dir(jaxcoll))


def test_pages_that_the_sources_refer_to_are_there():
    for path, text in SOURCES.items():
        for page in re.findall(r"\bdocs/\w+\.md\b", text):
            assert (ROOT / page).exists(), f"{path}: {page}"
        assert not re.search(r"\bthe\s+page\s+(on|of)\b", text, re.I), f"{path}: name the file"


def test_titles_in_the_navigation_are_those_of_the_pages():
    nav = re.findall(r'^ +- "?(.+?)"?: (\w+\.md)$', (ROOT / "mkdocs.yml").read_text("utf8"), re.M)
    titles = {page.name: page.read_text("utf8").splitlines()[0] for page in SITE}
    for internal in ("design.md", "decisions.md"):  # for people who change jaxcoll
        del titles[internal]
    assert {name: f"# {title}" for title, name in nav} == titles


def test_messages_that_a_page_explains_are_in_the_sources():
    troubles, hangs = (
        (ROOT / "docs" / f"{name}.md").read_text("utf8") for name in ("troubleshooting", "hangs")
    )
    rows = re.findall(r"^\| `(.+?)`( \(JAX's\))? \|", troubles + hangs, re.M)
    literals = "\n".join(
        node.value
        for text in SOURCES.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    missing = {words for words, of_jax in rows if not of_jax and words not in literals}
    assert missing - set(dir(jaxcoll)) == set()
    assert len(rows) > 15


def test_pages_are_short_promise_nothing_and_use_the_words_of_the_field():
    assert sum(len(page.read_text("utf8").split()) for page in SITE) <= MOST_WORDS
    for page in [*SITE, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for pattern in (PROMISES, OLD_WORDS):
            assert not (found := re.search(pattern, page.read_text("utf8"))), f"{page}: {found}"


def test_there_are_pages_with_code():
    assert {"README.md", "start.md", "sharp_bits.md"} <= {page.name for page in PAGES}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name):
    module = importlib.import_module(name)
    names = {k: getattr(jaxcoll, k) for k in dir(jaxcoll) if not k.startswith("_")}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = doctest.testmod(module, extraglobs=names)
    assert result.failed == 0
