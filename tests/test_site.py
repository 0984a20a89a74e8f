"""The site as it is built: links lead somewhere, and pages have names."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.product, pytest.mark.slow]
ANCHOR, LINK = re.compile(r'\s(?:id|name)="([^"]+)"'), re.compile(r'\s(?:href|src)="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder, and the text of each page by its place."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {
        str(path.parent.relative_to(folder)): path.read_text("utf8")
        for path in folder.rglob("index.html")
    }


def test_links_lead_somewhere(site):
    folder, pages = site
    anchors = {name: {*map(unescape, ANCHOR.findall(text))} for name, text in pages.items()}
    for name, text in pages.items():
        for link in map(urlsplit, map(unescape, LINK.findall(text))):
            if link.scheme or link.netloc:
                continue
            there = (folder / name / unquote(link.path)).resolve()
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), (name, link)
            if link.fragment and there.name == "index.html":
                known = anchors[str(there.parent.relative_to(folder))]
                assert unquote(link.fragment) in known | {"__skip"}, (name, link)


def test_site_is_for_users(site):
    folder, pages = site
    assert not {"design", "decisions"} & pages.keys()
    assert [*folder.rglob("__pycache__"), *folder.rglob("*.pyc")] == []
    asked = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"')
    for path in folder.rglob("*.html"):
        assert asked.findall(path.read_text("utf8")) == [], "loads nothing from elsewhere"
    nav = re.findall(r'^ +- "?(.+?)"?: (\S+)\.md$', (ROOT / "mkdocs.yml").read_text("utf8"), re.M)
    for title, name in nav[1:]:  # after the landing page
        assert f"<title>{title} - jaxcoll</title>" in pages[name.removesuffix("/index")]


def test_landing_page_is_readme(site):
    page = site[1]["."]
    readme = (ROOT / "README.md").read_text("utf8").split("\n## In a checkout", 1)[0]
    assert re.search(r"<h1[^>]*>jaxcoll<", page)
    for link in re.findall(r"\]\(docs/([\w/]+?)(?:/index)?\.md\)", readme):
        assert f"{link}/" in LINK.findall(page)
    assert "docs/landing.py" not in page


def test_reference_shows_public_signatures(site):
    texts = [text for name, text in site[1].items() if name.startswith("reference/")]
    listed = {*ANCHOR.findall("".join(texts))}
    sources = (path.read_text("utf8") for path in (ROOT / "docs/reference").glob("*.md"))
    paths = re.findall(r"^::: ([\w.]+)$", "\n".join(sources), re.M)
    assert set(paths) <= listed
    assert len(re.findall(r'class="[^"]*doc-signature', "".join(texts))) > len(paths)
    shown = {anchor.rpartition(".")[2] for anchor in listed if anchor.startswith("jaxcoll.")}
    assert not {"trace_recorded", "stages", "__get__"} & shown
    special = {f"__{name}__" for name in ("call", "iter", "len", "getitem")}
    assert not {name for name in shown if name.startswith("_")} - special
