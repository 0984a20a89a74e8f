"""A folder for a Unix socket, whose path the system keeps short."""

from __future__ import annotations

import os
import re
import tempfile

_MOST_BYTES = 103  # of a socket's path: 107 on Linux, 103 on macOS
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
_PREFIX = "jaxcoll-"


def make_socket_folder(name: str) -> str:
    """Make a new folder that nobody else may look into, for a socket of this name.

    It is where temporary files go, unless that path is too long for a socket, or has characters
    that mean something else in gRPC's addresses. Whoever makes it removes it; that of a process
    that was killed stays, because nothing tells it from a user's.

    Raises:
      OSError: there is no such place.
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
        f"`initialize` found no place for a Unix socket: of {usual!r} and {', '.join(_OTHERS)} "
        f"none can be written and gives at most {_MOST_BYTES} bytes. Set TMPDIR to a short path."
    )
