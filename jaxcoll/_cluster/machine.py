"""This machine's processor, as reports name it."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

_PROCESSOR = Path("/proc/cpuinfo")


@functools.cache
def machine() -> str:
    """Return this machine's processor, and its cores as far as this process may use them."""
    names = [
        line.partition(":")[2].strip()
        for line in (_PROCESSOR.read_text().splitlines() if _PROCESSOR.exists() else ())
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {cores()} cores"


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
