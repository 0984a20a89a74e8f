"""Settings of glibc's malloc that make it keep freed memory, and a test whether it does."""

from __future__ import annotations

import ctypes
import os
from typing import Any

SETTINGS = {
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, -1),
    "MALLOC_TOP_PAD_": (-2, 256 << 20),
    "MALLOC_ARENA_MAX": (-8, 1),
}
"""Parameter of `mallopt` and its value, by the environment variable that sets the same thing.

No block gets a mapping of its own, nothing is returned to the system, the heap grows in steps of
256 MiB, and threads started later share it.
"""

_PROBE = 72 << 20  # bytes; more than a thread's arena holds, which is 64 MiB


def keep_freed_memory() -> bool:
    """Make malloc keep memory that is freed from now on, and return True if anything was set.

    XLA's CPU runtime allocates all results and temporaries anew in every call, and malloc returns
    large blocks to the system at once. Each call then takes fresh pages, which over Gloo cost as
    much as the exchange. Values set by environment variables are kept. Other C libraries have no
    such settings.
    """
    libc = _glibc()
    if libc is None:
        return False
    unset = [pair for name, pair in SETTINGS.items() if name not in os.environ]
    done = [libc.mallopt(parameter, value) for parameter, value in unset]
    return any(done)


def keeps_freed_memory() -> bool:
    """Tell whether malloc keeps large freed blocks. This is tried with an untouched block."""
    libc = _glibc()
    if libc is None:
        return False
    block = libc.malloc(_PROBE)
    end = libc.sbrk(0)
    libc.free(block)
    # A block with a mapping of its own is above the heap; a returned block shortens the heap.
    return block is not None and block < end <= libc.sbrk(0)


def _glibc() -> Any:
    """Load this process's C library; None if it is not glibc."""
    if os.name != "posix":
        return None
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    return libc
