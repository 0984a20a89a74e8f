"""What Linux counts: bytes through the loopback interface, and how busy all cores were."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_NETWORK, _CORES = Path("/proc/net/dev"), Path("/proc/stat")


def loopback_bytes() -> int | None:
    """Bytes that have gone through the loopback interface; None where they are not counted."""
    return transmitted_bytes(_NETWORK.read_text(), "lo") if _NETWORK.exists() else None


def idle_rate(sent_bytes: Callable[[], int | None], seconds: float = 0.25) -> float:
    """Bytes per second that a counter counts while nothing is measured; 0 where there is none."""
    before, start = sent_bytes(), time.perf_counter()
    if before is None:
        return 0.0
    time.sleep(seconds)
    return ((sent_bytes() or 0) - before) / (time.perf_counter() - start)


def busy_seconds() -> float | None:
    """Seconds that all cores together have been busy; None where they are not counted."""
    if not _CORES.exists():
        return None
    return busy_ticks(_CORES.read_text()) / os.sysconf("SC_CLK_TCK")


# Between processes of one host everything goes through "lo", where each packet leaves once.
def transmitted_bytes(text: str, interface: str) -> int:
    """Bytes that an interface has sent, headers included, by the `text` of /proc/net/dev."""
    for line in text.splitlines():
        name, colon, counters = line.partition(":")
        fields = counters.split()
        if colon and name.strip() == interface and len(fields) >= 9:
            return int(fields[8])
    raise ValueError(
        f"expected the text of /proc/net/dev with a line for {interface!r}; got {text[:80]!r}."
    )


def busy_ticks(text: str) -> int:
    """Ticks of user, nice, system and interrupts on all cores, by the `text` of /proc/stat."""
    fields = text.partition("\n")[0].split()
    if len(fields) < 8 or fields[0] != "cpu":
        raise ValueError(f"expected the text of /proc/stat, with 'cpu' first; got {text[:80]!r}.")
    user, nice, system, _, _, interrupts, soft = map(int, fields[1:8])
    return user + nice + system + interrupts + soft
