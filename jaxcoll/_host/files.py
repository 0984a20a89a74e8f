"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

STALE_SECONDS = 3600.0
"""What nobody has written to for so long was left by somebody who died."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place if something was written in the end.

    It takes it in one step, after its bytes have reached the disk: who dies on the way, or finds
    the disk full, leaves the old file. What the dead left beside it is removed an hour later.

    Yields:
      The file beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beginning = f".{path.name}."
    for left in path.parent.glob(f"{glob.escape(beginning)}*{glob.escape(path.suffix)}"):
        with contextlib.suppress(OSError):  # somebody else was quicker
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=beginning, suffix=path.suffix)
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
