"""Make a page of the site from each notebook, with its stored outputs."""

import html
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File

_STORED = Path(__file__).parents[1] / "notebooks"
_outputs: dict[str, list[str]] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook to the files of the site."""
    for path in sorted(_STORED.glob("*.ipynb")):
        place = f"notebooks/{path.stem}.md"
        notebook = nbformat.read(path, as_version=4)
        outputs = _outputs[place] = []
        text = "\n\n".join(_markdown(cell, outputs) for cell in notebook.cells)
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite links between pages and notebooks to the site's addresses."""
    markdown = re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)
    return markdown.replace("](../docs/", "](../")


def on_page_content(page_html: str, page: Any, **_: Any) -> str:
    """Insert the outputs of the cells, untouched by Markdown."""
    for number, output in enumerate(_outputs.get(page.file.src_uri, [])):
        page_html = page_html.replace(f'<div id="output-{number}"></div>', output)
    return page_html


def _markdown(cell: Any, outputs: list[str]) -> str:
    if cell.cell_type == "markdown":
        return cell.source
    parts = [f"```python\n{cell.source}\n```"]
    for output in cell.get("outputs", []):
        parts.append(f'<div id="output-{len(outputs)}"></div>')
        outputs.append(f'<div class="output">{_shown(output)}</div>')
    return "\n\n".join(parts)


def _shown(output: Any) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return data["text/html"]
    if "image/png" in data:
        return (
            f'<img alt="drawn by the cell above" src="data:image/png;base64,{data["image/png"]}">'
        )
    text = output.get("text") or data["text/plain"]
    return f"<pre><code>{html.escape(text)}</code></pre>"
