"""Bytes that Linux has counted at a network interface."""

from __future__ import annotations

from pathlib import Path

_NETWORK = Path("/proc/net/dev")


def loopback_bytes() -> int | None:
    """Bytes that have gone through the loopback interface; None where they are not counted."""
    return transmitted_bytes(_NETWORK.read_text(), "lo") if _NETWORK.exists() else None


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
