"""What the pages show is what happens: every Python block is run, every docstring example too."""

import ast
import doctest
import importlib
import os
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
assert {"README.md", "start.md", "sharp_bits.md"} <= {page.name for page in PAGES}
SOURCES = {path: path.read_text("utf8") for path in sorted((ROOT / "jaxcoll").rglob("*.py"))}
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
MOST_WORDS = 20_000  # in all; 1,340 of them are not on the site
PROMISES = r"\b(not yet|in this release|coming soon|will be (?:added|supported)|TODO|roadmap)\b"
OLD_WORDS = r"\b(crew|muster|told|come home|out of breath|left behind|sign of life|stop here|Law:)"
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path, text in SOURCES.items()
    if ">>> " in text
]
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
def test_page_code_runs(page, tmp_path, python):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    code = code.replace("range(400)", "range(4)")  # steps of the README
    (tmp_path / "page.py").write_text(code + FROM_THE_WHEEL)
    done = python.run(forks.SCRIPT, "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def shown_first(path):
    """The first Python of a page, and the first text that it shows."""
    page = (ROOT / path).read_text("utf8")
    return page, *(
        re.search(f"^```{kind}\n(.*?)^```", page, re.M | re.S)[1] for kind in ("python", "text")
    )


def run_as_users(python, code, tmp_path, form, *words):
    # A file, because Python from 3.13 on finds the lines of `-c` as well, and older ones do not.
    (tmp_path / "train.py").write_text(code)
    done = python.run(AS_USERS_COMPILE + form, *words, cwd=tmp_path, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.product
def test_shown_report_is_printed(tmp_path, python):
    _, code, shown = shown_first("docs/reading_a_report.md")
    done = run_as_users(python, code, tmp_path, forks.SCRIPT, "train.py")
    # What differs from machine to machine is left out, by "…".
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), done.stdout), done.stdout


@pytest.mark.product
def test_readme_table_is_printed(tmp_path, python):
    readme, code, shown = shown_first("README.md")
    command = re.search(r"^jaxcoll (inspect .*?train\.py)", readme, re.M)[1].split()
    done = run_as_users(python, code, tmp_path, forks.COMMAND, "jaxcoll", *command)
    columns, row, place = (line.split() for line in shown.splitlines())
    table = [line.split() for line in done.stderr.splitlines()]
    begin = table.index(columns)
    name, _, *sent = row[:-4]  # Python 3.12 counts calls; times differ from run to run
    assert table[begin + 1][0] == name, done.stderr
    assert table[begin + 1][2 : 2 + len(sent)] == sent, done.stderr
    assert table[begin + 2] == place, done.stderr


def test_pages_need_documented_packages():
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


def test_links_and_names_exist():
    for page in EVERY:
        text = page.read_text("utf8")
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            path, _, anchor = link.partition("#")
            if not path.startswith("http"):
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), (page, link)
                assert not anchor or anchor in anchors(target), (page, link)
        for path in re.findall(r"(?<![\w/.-])(?:jaxcoll|tests|notebooks|docs)/[\w./]*\w", text):
            assert (ROOT / path).exists(), (page, path)
        for module in re.findall(r"python -m (tests[.\w]+)", text):
            file = (ROOT / module.replace(".", "/")).with_suffix(".py")
            assert file.exists(), (page, module)
        if page.name != "CHANGELOG.md":
            names = set(re.findall(r"\bjc\.(\w+)", text))
            assert names <= set(dir(jaxcoll)), (page, names - set(dir(jaxcoll)))


def test_sources_cite_existing_pages():
    for path, text in SOURCES.items():
        for page in re.findall(r"\bdocs/\w+\.md\b", text):
            assert (ROOT / page).exists(), f"{path}: {page}"
        assert not re.search(r"\bthe\s+page\s+(on|of)\b", text, re.I), f"{path}: name the file"


def test_navigation_has_page_titles():
    nav = re.findall(r'^ +- "?(.+?)"?: (\w+\.md)$', (ROOT / "mkdocs.yml").read_text("utf8"), re.M)
    titles = {page.name: page.read_text("utf8").splitlines()[0] for page in SITE}
    for internal in ("design.md", "decisions.md"):  # for people who change jaxcoll
        del titles[internal]
    assert {name: f"# {title}" for title, name in nav} == titles


def test_explained_messages_exist():
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
    missing = {message for message, of_jax in rows if not of_jax and message not in literals}
    assert missing - set(dir(jaxcoll)) == set()
    assert len(rows) > 15


def test_pages_are_short_and_plain():
    assert sum(len(page.read_text("utf8").split()) for page in SITE) <= MOST_WORDS
    for page in [*SITE, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for pattern in (PROMISES, OLD_WORDS):
            assert not (match := re.search(pattern, page.read_text("utf8"))), f"{page}: {match}"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    names = {k: getattr(jaxcoll, k) for k in dir(jaxcoll) if not k.startswith("_")}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = doctest.testmod(module, extraglobs=names)
    assert result.attempted
    assert result.failed == 0
