"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place if something was written in the end.

    It takes it in one step, after its bytes have reached the disk: who dies on the way, or finds
    the disk full, leaves the old file.

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
            _to_disk(partial)
            partial.replace(path)
            _to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
