"""Real text that every machine with Python has: the source of its standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MOST = 1 << 20
"""Bytes that are read at most."""


def load() -> np.ndarray:
    """The first `MOST` bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= MOST:
            break
    return np.frombuffer(bytes(text[:MOST]), np.uint8)


def batches(
    text: np.ndarray, size: int, length: int, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """Batches of pieces of the text, the same ones for the same seed.

    Yields:
      int32 of shape (size, length + 1): the last byte of each piece is only predicted.
    """
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - length, (size, 1))
        yield text[starts + np.arange(length + 1)].astype(np.int32)
