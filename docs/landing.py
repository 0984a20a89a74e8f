"""Copy README.md into the landing page."""

from pathlib import Path
from typing import Any

_PLACE = "<!-- README.md stands here, without its last section; docs/landing.py puts it in. -->"
_END = "\n## In a checkout"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert README.md into the landing page, with the site's links; leave other pages alone."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf8")
    _, _, below_title = readme.partition("\n")
    first, end, _ = below_title.partition(_END)
    assert end, _END
    assert _PLACE in markdown
    return markdown.replace(_PLACE, first.replace("](docs/", "](").strip())
