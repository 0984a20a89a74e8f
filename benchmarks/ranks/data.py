"""Make each replica's values, and the exact reduction, without a float64 copy of the tree.

A replica has one block of normal numbers, and leaf i is a cyclic slice of it with its own offset.
The block's length is no multiple of a pack's or shard's size, so a misplaced part is detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

BLOCK = 1_000_003
_STRIDE = 104_729


def block(replica: int) -> np.ndarray:
    """Return the numbers of one replica: float32, the same in every process."""
    return np.random.default_rng([7, replica]).standard_normal(BLOCK, np.float32)


def held(normals: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert a block to `dtype`; unsigned integers take the magnitudes."""
    return (np.abs(normals) if dtype.kind == "u" else normals).astype(dtype)


def leaf(values: np.ndarray, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return leaf number `index` of the replica with block `values`, as a new array."""
    flat = np.empty(int(np.prod(shape, dtype=np.int64)), values.dtype)
    for start, stop, where in _pieces(index, flat.size):
        flat[start:stop] = values[where]
    return flat.reshape(shape)


class Exact:
    """The exact reduction in float64, with which results are compared leaf by leaf."""

    def __init__(self, blocks: Iterable[np.ndarray], mean: bool) -> None:
        self._sum, self._size = np.zeros(BLOCK), np.full(BLOCK, 1e-30)
        replicas = 0
        for values in blocks:
            wide = values.astype(np.float64)
            self._sum += wide
            self._size += np.abs(wide)
            replicas += 1
        if mean:
            self._sum /= replicas
            self._size /= replicas

    def error(self, index: int, got: np.ndarray) -> float:
        """Return the largest |x - exact| / sum of magnitudes in leaf `index`; inf for NaN."""
        flat, worst = got.reshape(-1), 0.0
        for start, stop, where in _pieces(index, flat.size):
            off = np.abs(flat[start:stop].astype(np.float64) - self._sum[where])
            worst = max(worst, float(np.max(off / self._size[where])))
            if not np.isfinite(off).all():
                return float("inf")
        return worst


def _pieces(index: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield start and stop in a leaf of `size` elements, and the matching slice of the block."""
    offset, start = index * _STRIDE % BLOCK, 0
    while start < size:
        count = min(BLOCK - offset, size - start)
        yield start, start + count, slice(offset, offset + count)
        start, offset = start + count, 0
