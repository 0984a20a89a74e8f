"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_writable(flag: str, file: Path) -> None:
    """Find out before the work whether its result can be written.

    Raises:
      ValueError: it cannot; the message names the flag.
    """
    reason = "it is a folder" if file.is_dir() else None
    try:
        if reason is None:
            with replacing(file):
                pass
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ValueError(
            f"{flag}: cannot write {file} ({reason}); name a place that can be written."
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place if something was written in the end.

    Yields:
      The file beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        if partial.stat().st_size:
            partial.chmod(0o644)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
