"""Puts README.md into the landing page, so that it is written once."""

from pathlib import Path
from typing import Any

_PLACE = "<!-- README.md stands here, without its last section; docs/landing.py puts it in. -->"
_END = "\n## In a checkout"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page; that of the landing page with links as the site has them."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf8")
    _, _, below_title = readme.partition("\n")
    first, end, _ = below_title.partition(_END)
    assert end, _END
    assert _PLACE in markdown
    return markdown.replace(_PLACE, first.replace("](docs/", "](").strip())
