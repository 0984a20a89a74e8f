"""What the commands share: what they need, and where their results go."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from jaxcoll._files import check_writable, write_text

_PACKAGES = {"sklearn": "scikit-learn"}


def check_installed(extra: str, *modules: str, flag: str = "") -> None:
    """Refuse what needs a package that is not installed, and name the extra that brings it."""
    missing = [_PACKAGES.get(m, m) for m in modules if not importlib.util.find_spec(m)]
    if missing:
        raise ValueError(
            f"{flag} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: pip install 'jaxcoll[{extra}]'".lstrip()
        )


def check_results(json: str | None, plot: Path | None = None) -> None:
    """Find out before the work whether the files of --json and --plot can be written."""
    if plot is not None:
        if plot.suffix != ".png":
            raise ValueError(f"--plot: expected a name that ends in .png; got {plot}.")
        check_writable("--plot", plot)
    if json not in (None, "-"):
        check_writable("--json", Path(json))


def write_lines(json: str | None, text: str) -> None:
    """Write all of `text` or nothing to the file of --json; "-" is standard output."""
    if json == "-":
        sys.stdout.write(text)
    elif json is not None:
        write_text("--json", Path(json), text)
