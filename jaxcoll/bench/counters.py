"""The machine's own counters, where there are some: Linux, between processes of this host."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jaxcoll.bench.kernel import busy_ticks, transmitted_bytes

_NETWORK, _CORES = (Path("/proc") / x for x in ("net/dev", "stat"))


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
