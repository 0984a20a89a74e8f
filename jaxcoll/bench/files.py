"""Whether a result can be written, found out before the work."""

from __future__ import annotations

from pathlib import Path

from jaxcoll._host.files import replacing


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
