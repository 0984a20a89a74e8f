"""The site as it is built: links lead somewhere, and pages have names."""

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

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.product, pytest.mark.slow]


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


def test_links_lead_somewhere(site):
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


def test_pages_are_titled_and_indexed(site):
    folder, pages = site
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf8").replace("!ENV", ""))
    groups = [entry for entry in config["nav"] if isinstance(next(iter(entry.values())), list)]
    index = json.loads((folder / "search" / "search_index.json").read_text("utf8"))["docs"]
    places = {entry["location"] for entry in index}
    for group in groups:
        for entry in next(iter(group.values())):
            ((title, file),) = entry.items()
            place = file.removesuffix(".md").removesuffix("index")
            page = pages[place.removesuffix("/") or "."]
            assert page.title == f"{title} - jaxcoll"
            assert f"{place.removesuffix('/')}/" in places or file == "reference/index.md"


def test_site_is_for_users(site):
    folder, pages = site
    assert not {"design", "decisions"} & pages.keys()
    assert [*folder.rglob("__pycache__"), *folder.rglob("*.pyc")] == []


def test_landing_page_is_readme(site):
    _, pages = site
    readme = (ROOT / "README.md").read_text("utf8").split("\n## In a checkout", 1)[0]
    assert pages["."].heads[0] == "jaxcoll"
    for link in re.findall(r"\]\(docs/([\w/]+?)(?:/index)?\.md\)", readme):
        assert f"{link}/" in pages["."].links
    assert "docs/landing.py" not in (site[0] / "index.html").read_text("utf8")


def test_reference_shows_public_signatures(site):
    folder, pages = site
    names = [name for name in pages if name.startswith("reference/")]
    listed = set().union(*(pages[name].anchors for name in names))
    paths = re.findall(
        r"^::: ([\w.]+)$",
        "\n".join(path.read_text("utf8") for path in (ROOT / "docs/reference").glob("*.md")),
        re.M,
    )
    assert set(paths) <= listed
    texts = [(folder / name / "index.html").read_text("utf8") for name in names]
    signatures = sum(len(re.findall(r'class="[^"]*doc-signature', text)) for text in texts)
    assert signatures > len(paths)
    shown = {anchor.rpartition(".")[2] for anchor in listed if anchor.startswith("jaxcoll.")}
    assert not {"trace_recorded", "stages", "__get__"} & shown
    special = {f"__{name}__" for name in ("call", "iter", "len", "getitem")}
    assert not {name for name in shown if name.startswith("_")} - special


def test_pages_load_nothing_elsewhere(site):
    asked = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"')
    for path in site[0].rglob("*.html"):
        assert asked.findall(path.read_text("utf8")) == [], path
