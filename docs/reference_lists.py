"""List every public name on the first page of the API reference, grouped by page."""

import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

_PLACE = "<!-- The lists stand here; docs/reference_lists.py makes them. -->"
_FOLDER = Path(__file__).parent / "reference"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Insert a list of names for each reference page into the first one."""
    if page.file.src_uri != "reference/index.md":
        return markdown
    assert _PLACE in markdown
    nav = re.findall(r"'reference/(\w+\.md)'", str(config.nav))
    lists = [_listed(name) for name in nav if name != "index.md"]
    return markdown.replace(_PLACE, "\n\n".join(lists))


def _listed(page: str) -> str:
    text = (_FOLDER / page).read_text("utf8")
    title = text.partition("# ")[2].partition("\n")[0]
    rows = [f"## [{title}]({page})", "| name | |\n| --- | --- |"]
    for path in re.findall(r"^::: ([\w.]+)$", text, re.M):
        (first, *_) = (inspect.getdoc(pkgutil.resolve_name(path)) or "").split("\n\n", 1)
        summary = " ".join(first.split()).replace("|", "\\|")
        # A class that users receive but never construct has no public path.
        name = path.rpartition(".")[2] if "._" in path else path.removeprefix("jaxcoll.")
        rows[-1] += f"\n| [`{name}`]({page}#{path}) | {summary} |"
    return "\n\n".join(rows)
