"""The machine's own counters, where there are some: Linux, between processes of this host."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from jaxcoll._observe.kernel import busy_ticks, transmitted_bytes

_NETWORK, _CORES, _PROCESSOR = (Path("/proc") / x for x in ("net/dev", "stat", "cpuinfo"))


def loopback_bytes() -> int | None:
    """Bytes that have gone through the loopback interface; None where nobody counts them."""
    return transmitted_bytes(_NETWORK.read_text(), "lo") if _NETWORK.exists() else None


def idle_loopback_rate(seconds: float = 0.25) -> float:
    """Bytes a second that others send through loopback while nothing is measured."""
    before, start = loopback_bytes() or 0, time.perf_counter()
    time.sleep(seconds)
    return ((loopback_bytes() or 0) - before) / (time.perf_counter() - start)


def busy_seconds() -> float | None:
    """Seconds that all cores together have been busy; None where nobody counts them."""
    if not _CORES.exists():
        return None
    return busy_ticks(_CORES.read_text()) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """This machine's processor, and its cores as far as this process may use them."""
    names = [
        line.partition(":")[2].strip()
        for line in (_PROCESSOR.read_text().splitlines() if _PROCESSOR.exists() else ())
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
