"""The site as it is built: links lead somewhere, pages have names and are legible in a browser."""

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from browser import CHROMIUM, ILLEGIBLE, Browser, served

import jaxcoll
from jaxcoll._show.table import Table, folding_html

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed here")


class Page(html.parser.HTMLParser):
    """What of a page can be linked to, what it links to, and its names."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.title, self.heads, self.code = set(), [], "", [], []
        self._inside = []
        self.feed(path.read_text("utf8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        for name in ("href", "src"):
            if given.get(name):
                self.links.append(given[name])
        if tag in ("title", "h1", "h2"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        match self._inside[-1:]:
            case ["title"]:
                self.title += data
            case ["h1" | "h2"]:
                self.heads.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {
        str(path.parent.relative_to(folder)): Page(path) for path in folder.rglob("index.html")
    }


def test_every_link_of_every_page_leads_somewhere(site):
    folder, pages = site
    broken = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (folder / name / unquote(parts.path)).resolve() if parts.path else folder / name
            )
            there = target / "index.html" if target.is_dir() else target
            if not there.exists():
                broken.append((name, link))
            elif parts.fragment and there.name == "index.html":
                known = pages[str(there.parent.relative_to(folder))].anchors
                if unquote(parts.fragment) not in known | {"__skip"}:
                    broken.append((name, link))
    assert broken == []


def test_every_page_of_the_navigation_has_its_title_and_can_be_searched(site):
    folder, pages = site
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf8").replace("!ENV", ""))
    groups = [entry for entry in config["nav"] if isinstance(next(iter(entry.values())), list)]
    named = ["Start", "Train", "Look", "Notebooks", "Clusters", "Reference", "Inside"]
    assert [next(iter(group)) for group in groups] == named
    found = json.loads((folder / "search" / "search_index.json").read_text("utf8"))["docs"]
    places = {entry["location"] for entry in found}
    for group in groups:
        for entry in next(iter(group.values())):
            ((title, file),) = entry.items()
            page = pages[file.removesuffix(".md")]
            assert page.title == f"{title} - jaxcoll"
            assert f"{file.removesuffix('.md')}/" in places


def test_the_landing_page_is_the_first_screen_of_the_readme(site):
    _, pages = site
    first = (ROOT / "README.md").read_text("utf8").split("\n## ", 1)[0]
    text = (site[0] / "index.html").read_text("utf8")
    assert pages["."].heads[0] == "jaxcoll"
    for link in re.findall(r"\]\(docs/(\w+)\.md\)", first):
        assert f"{link}/" in pages["."].links
    assert "Do I need it?" in text
    assert "docs/landing.py" not in text


def test_the_reference_has_every_public_name_with_its_signature(site):
    reference = site[1]["face"]
    public = {name for name in vars(jaxcoll) if not name.startswith("_")}
    listed = {anchor.removeprefix("jaxcoll.") for anchor in reference.anchors}
    callables = {name for name in public if callable(getattr(jaxcoll, name))}
    assert callables <= listed
    text = (site[0] / "face" / "index.html").read_text("utf8")
    assert len(re.findall(r'class="[^"]*doc-signature', text)) > len(callables)


def test_no_page_asks_another_host_for_anything(site):
    asked = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"')
    for path in site[0].rglob("*.html"):
        assert asked.findall(path.read_text("utf8")) == [], path


SCHEME = "document.body.dataset.mdColorScheme"
CHOOSE = """
document.head.insertAdjacentHTML("beforeend", "<style>* {{transition: none !important}}</style>");
document.querySelector("input[data-md-color-scheme={}]").click();
"""


@in_a_browser
def test_every_page_is_legible_in_a_browser_and_runs_without_an_error(site):
    """On a phone in the dark, and at a desk in the light."""
    folder, pages = site
    found = {}
    with served(folder) as address, Browser() as browser:
        for name in pages:
            browser.open(f"{address}{name}/", 390)
            found[name] = []
            for scheme, width in (("slate", 390), ("default", 1280)):
                browser.resize(width)
                browser.value(CHOOSE.format(scheme))
                assert browser.value(SCHEME) == scheme
                found[name] += browser.value(ILLEGIBLE)
            found[name] += browser.errors
            browser.errors.clear()
    assert len(found) > 30
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@in_a_browser
@pytest.mark.parametrize(("dark", "scheme"), [(True, "slate"), (False, "default")])
def test_who_prefers_the_dark_sees_a_page_so(site, dark, scheme):
    with served(site[0]) as address, Browser() as browser:
        browser.open(address, 1280, dark=dark)
        assert browser.value(SCHEME) == scheme


@in_a_browser
def test_a_table_sorts_by_a_click_or_a_key_on_a_column_and_folds(tmp_path):
    rows = [("1", "9.30 MB"), ("2", "16.8 MB"), ("10", "637.1 kB"), ("11", "–")]
    table = Table(("pack", "bytes"), ">>", rows, [f"leaf {k}" for k, _ in rows], "… and 3 more")
    page = '<meta charset="utf-8"><link rel="icon" href="data:,">' + folding_html(
        "packs", table.html()
    )
    (tmp_path / "index.html").write_text(page, "utf8")
    order = "[...document.querySelectorAll('tr')].map(row => row.cells[row.cells.length > 1 ? %d : 0].innerText)"
    with served(tmp_path) as address, Browser() as browser:
        browser.open(address, 800)
        browser.value("document.querySelectorAll('th')[1].click()")
        packs = browser.value(order % 0)
        assert packs == ["pack", "11", "", "10", "", "1", "", "2", "", "… and 3 more"]
        browser.value("document.querySelectorAll('th')[1].click()")
        assert browser.value(order % 1)[1:5] == ["16.8 MB", "leaf 2", "9.30 MB", "leaf 1"]
        for first in ("1", "11", "1"):
            browser.value("document.querySelectorAll('th')[0].click()")
            assert browser.value(order % 0)[1] == first
        browser.value("document.querySelectorAll('th')[1].focus()")
        for kind in ("keyDown", "keyUp"):
            browser("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter")
        assert browser.value(order % 0) == packs
        visible = "document.querySelector('td').checkVisibility()"
        assert browser.value(visible)
        browser.value("document.querySelector('summary').click()")
        assert not browser.value(visible)
        assert browser.errors == []
