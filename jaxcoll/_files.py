"""Files of results that commands write; an error names the flag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_writable(flag: str, file: Path) -> None:
    """Find out before the work whether its result can be written."""
    if file.is_dir():
        raise ValueError(f"{flag}: cannot write {file} (it is a folder).")
    if not file.exists():
        write_result(flag, file, lambda path: path.touch())
        file.unlink()


def write_result(flag: str, file: Path, write: Callable[[Path], Any]) -> None:
    """Write a result by `write`, which is given the file to write."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
    except OSError as error:
        raise ValueError(
            f"{flag}: cannot write {file} ({error.strerror}); name a place that can be written."
        ) from error


def write_text(flag: str, file: Path, text: str) -> None:
    """Write a result that is text."""
    write_result(flag, file, lambda path: path.write_text(text, encoding="utf-8"))
