"""glibc's malloc: have it keep the memory that is freed, and ask whether it does."""

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
"""By the environment variable of the same meaning: `mallopt`'s parameter, and the value set here.

No block is mapped by itself, nothing is returned to the system, the heap grows by 256 MiB at once,
and threads that begin later share it.
"""

_PROBE = 72 << 20  # more than malloc ever takes from a thread's own arena, of 64 MiB


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed from now on; whether anything was set.

    XLA's CPU runtime allocates every result and all temporaries of every call anew, and malloc
    returns large blocks to the system at once: each call then takes fresh pages, which over Gloo
    cost as much as the exchange. What a variable of the environment has set stays. Other C
    libraries have no such settings.
    """
    libc = _glibc()
    if libc is None:
        return False
    unset = [pair for name, pair in SETTINGS.items() if name not in os.environ]
    done = [libc.mallopt(parameter, value) for parameter, value in unset]
    return any(done)


def keeps_freed_memory() -> bool:
    """True if malloc keeps large blocks that are freed, as a block shows that nobody touches."""
    libc = _glibc()
    if libc is None:
        return False
    block = libc.malloc(_PROBE)
    end = libc.sbrk(0)
    libc.free(block)
    # A block that was mapped by itself is above the heap, and one that was returned shortens it.
    return block is not None and block < end <= libc.sbrk(0)


def _glibc() -> Any:
    """The C library of this process; None: it is another one."""
    if os.name != "posix":
        return None
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    return libc
