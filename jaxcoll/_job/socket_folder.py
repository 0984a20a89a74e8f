"""A folder for a Unix socket, with a path short enough for the operating system."""

from __future__ import annotations

import os
import re
import tempfile

_MOST_BYTES = 103  # of a socket's path: 107 on Linux, 103 on macOS
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
_PREFIX = "jaxcoll-"


def make_socket_folder(name: str) -> str:
    """Make a new private folder for a socket of this name.

    It is in the folder for temporary files, unless that path is too long for a socket, or has
    characters with a special meaning in gRPC's addresses. The caller removes it. A killed process
    leaves its folder behind, and nothing else removes it: it could be the user's.

    Raises:
      OSError: no suitable folder can be written.
    """
    usual = tempfile.gettempdir()
    for parent in dict.fromkeys((usual, *_OTHERS)):
        length = len(os.fsencode(f"{parent}/{_PREFIX}12345678/{name}"))
        if length > _MOST_BYTES or re.search(r"[%?#]", parent):
            continue
        try:
            return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError:
            continue
    raise OSError(
        f"`initialize` found no folder for a Unix socket: {usual!r}, {', '.join(_OTHERS)} are not "
        f"writable, or make a path of more than {_MOST_BYTES} bytes. Set TMPDIR to a short path."
    )
