"""Bytes that Linux counts at a network interface."""

from __future__ import annotations

from pathlib import Path

_NETWORK = Path("/proc/net/dev")


def loopback_bytes() -> int | None:
    """Return the bytes sent through the loopback interface, or None if they are not counted."""
    return transmitted_bytes(_NETWORK.read_text(), "lo") if _NETWORK.exists() else None


def transmitted_bytes(text: str, interface: str) -> int:
    """Return the bytes an interface has sent, headers included, from /proc/net/dev's `text`."""
    # Processes of one host exchange all bytes through "lo", which counts each packet once.
    for line in text.splitlines():
        name, colon, counters = line.partition(":")
        fields = counters.split()
        if colon and name.strip() == interface and len(fields) >= 9:
            return int(fields[8])
    raise ValueError(
        f"expected the text of /proc/net/dev with a line for {interface!r}; got {text[:80]!r}."
    )
