"""Writes files of results in one step, and changes nothing else at their path."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

_LOG = logging.getLogger("jaxcoll")

STALE_SECONDS = 3600.0
"""A partial file that was not written to for so long was left by a process that died."""

_MOST_LINKS = 40


@contextlib.contextmanager
def replacing(path: Path, rename: Callable[[Path, Path], None] | None = None) -> Iterator[Path]:
    """A file to write, whose bytes stand at `path` in the end, if something was written.

    Law: a regular file is replaced in one step, after the bytes have reached the disk: a process
    that dies on the way, or finds the disk full, leaves the old file. It keeps its mode and its
    owner; a new one has the mode that the umask leaves. Links are followed and stay. What is no
    regular file, such as a pipe or a device, is written to and stays what it is, and so is an open
    file of this process, such as /dev/stdout. What a dead process left is removed an hour later.

    `rename` is called in place of `put`, to decide once more whether a regular file is replaced.

    Yields:
      The file to write, of the same suffix.
    """
    file = _replaced(path)
    if file is None:
        with tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder:
            partial = Path(folder) / f"result{path.suffix}"
            partial.touch()
            yield partial
            _write_through(partial, path)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(file)
    partial = _created_beside(file, path.suffix)
    try:
        yield partial
        if partial.stat().st_size:
            _make_alike(partial, file)
            _to_disk(partial)
            (rename or put)(partial, file)
            _to_disk(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(flag: str, file: Path) -> None:
    """Find out before the work whether its result can be written; the error names the flag."""
    with _refused_by_flag(flag, file):
        # To open a pipe would wait for its reader, and to close it would end what is read.
        if _replaced(file) is not None:
            with replacing(file):
                pass


def write_result(flag: str, file: Path, write: Callable[[Path], Any]) -> None:
    """Write a result by `write`, which is given the file to write; an error names the flag."""
    with _refused_by_flag(flag, file), replacing(file) as partial:
        write(partial)


def write_text(flag: str, file: Path, text: str) -> None:
    """Write a result that is text; an error names the flag."""
    write_result(flag, file, lambda partial: partial.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def _refused_by_flag(flag: str, file: Path) -> Iterator[None]:
    """Raise what the system refuses as a ValueError that names the flag."""
    try:
        yield
    except OSError as error:
        known = {errno.EISDIR: "it is a folder", errno.ENXIO: "it is a socket"}
        reason = known.get(error.errno or 0, error.strerror)
        raise ValueError(
            f"{flag}: cannot write {file} ({reason}); name a place that can be written."
        ) from error


def _replaced(path: Path) -> Path | None:
    """The regular file, there or not, that is replaced; None: what stands there is written to."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))  # a link to nothing makes what it points to
    if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise OSError(number, os.strerror(number), str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    is_file = stat.S_ISREG(mode) and _descriptor(path) is None
    return Path(os.path.realpath(path)) if is_file else None


def _descriptor(path: Path) -> int | None:
    """The number of this process's open file that a path stands for, as /dev/stdout for 1."""
    at = os.path.join(os.getcwd(), path)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.realpath(os.path.dirname(at)), os.path.basename(at)
        # A link of this folder leads to no path: there may be none, and a shell's `> file` would
        # find its file gone if another took its place.
        if re.fullmatch(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd", folder):
            return int(name) if name.isdecimal() else None
        at = os.path.join(folder, name)
        if not os.path.islink(at):
            return None
        at = os.path.join(folder, os.readlink(at))
    return None


def _write_through(partial: Path, path: Path) -> None:
    number = _descriptor(path)
    handle = os.open(path, os.O_WRONLY | os.O_NOCTTY) if number is None else os.dup(number)
    with os.fdopen(handle, "wb") as target, partial.open("rb") as source:
        shutil.copyfileobj(source, target)


def _created_beside(file: Path, suffix: str) -> Path:
    """A new file in the same folder, of the mode that the umask leaves."""
    # While it is written it must not be readable to more users than the file it replaces.
    mode = 0o600 if file.exists() else 0o666
    partial = file.with_name(f"{_beginning(file)}{secrets.token_hex(8)}{suffix}")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    return partial


def _beginning(file: Path) -> str:
    """How the names of its partial files begin, and of no others; without another suffix."""
    return f".jaxcoll-{file.name[:150].replace('.', '_')}-"


def _remove_stale(file: Path) -> None:
    for left in file.parent.glob(f"{glob.escape(_beginning(file))}*"):
        with contextlib.suppress(OSError):  # another process removed it first
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()


def _make_alike(partial: Path, file: Path) -> None:
    """Give it the mode of the file that it replaces and, where that is allowed, the owner."""
    try:
        before = file.stat()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):
        os.chown(partial, before.st_uid, before.st_gid)
    partial.chmod(stat.S_IMODE(before.st_mode))


def put(partial: Path, file: Path) -> None:
    """Have a file of the same folder, whose bytes are on the disk, take the place of `file`."""
    try:
        partial.replace(file)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        shutil.copyfile(partial, file)  # a mount point, as of one file in a container
        _to_disk(file)


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Holds a lock on a file, which others that ask here wait for, on any host.

    The system frees the lock of a process that ends. It is on a file beside `path`, which stays:
    if it were removed, two could hold a lock on a file of that name. A file system that has no
    locks (Lustre can be mounted so) is warned of once, and used.

    Raises:
      TimeoutError: another process held it for longer than so many seconds.
    """
    beside = path.with_name(f".{path.name[:150]}-lock")
    handle = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + seconds
        while not _locks(handle, beside):
            if time.monotonic() > until:
                words = f"another process has held this lock for {seconds:g} s; is one stopped?"
                raise TimeoutError(errno.ETIMEDOUT, words, str(beside))
            time.sleep(0.02)
        yield
    finally:
        if fcntl is not None:  # a child that was forked meanwhile has the file open, too
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _locks(handle: int, beside: Path) -> bool:
    """Whether the lock is had, or there can be none."""
    if fcntl is None:
        _without_locks(str(beside.parent))
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        _without_locks(str(beside.parent))
    return True


@functools.cache
def _without_locks(folder: str) -> None:
    _LOG.warning(
        "%s has no file locks: a worker that was stopped while it wrote a checkpoint may replace a "
        "newer one.",
        folder,
    )


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
