"""A folder for a Unix socket, whose path the system keeps short."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import tempfile

_MOST_BYTES = 103  # of a socket's path: 107 on Linux, 103 on macOS
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
_PREFIX, _LOCK = "jaxcoll-", "lock"

_locks: dict[str, int] = {}
"""Descriptors of the locks of this process's folders, which the system frees when it dies."""


def make_socket_folder(name: str) -> str:
    """A new folder that nobody else may look into, for a socket of this name.

    It is where temporary files go, unless that path is too long for a socket, or has characters
    that mean something else in gRPC's addresses. Folders of processes that were killed are removed.

    Raises:
      OSError: there is no such place.
    """
    usual = tempfile.gettempdir()
    for parent in dict.fromkeys((usual, *_OTHERS)):
        length = len(os.fsencode(f"{parent}/{_PREFIX}12345678/{name}"))
        if length > _MOST_BYTES or re.search(r"[%?#]", parent):
            continue
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError:
            continue
        with contextlib.suppress(ImportError, OSError):  # no locks: nothing is removed
            _lock(folder)
            _remove_abandoned(parent)
        return folder
    raise OSError(
        f"`initialize` found no place for a Unix socket: of {usual!r} and {', '.join(_OTHERS)} "
        f"none can be written and gives at most {_MOST_BYTES} bytes. Set TMPDIR to a short path."
    )


def _lock(folder: str) -> None:
    import fcntl

    for removed in [known for known in _locks if not os.path.exists(known)]:
        os.close(_locks.pop(removed))
    new = f"{folder}/new"
    held = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.rename(new, f"{folder}/{_LOCK}")  # it is there only once it is held
    _locks[folder] = held


def _remove_abandoned(parent: str) -> None:
    """Remove folders whose locks nobody holds, because their processes were killed."""
    import fcntl

    for lock in glob.glob(f"{glob.escape(parent)}/{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another's, or removed meanwhile
            found = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(lock), ignore_errors=True)
            finally:
                os.close(found)
