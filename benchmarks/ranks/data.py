"""What each replica holds, and what its sum has to be, without a copy of the tree in float64.

A replica has one block of normal numbers, and leaf i is a cyclic slice of it that starts
somewhere else for every leaf. The block's length is a multiple of no size of pack or shard, so
that a part which ends up in the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

BLOCK = 1_000_003
_STRIDE = 104_729


def block(replica: int) -> np.ndarray:
    """The numbers of one replica: float32, the same in every process that asks."""
    return np.random.default_rng([7, replica]).standard_normal(BLOCK, np.float32)


def held(normals: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A block as leaves of `dtype` hold it; unsigned integers hold magnitudes."""
    return (np.abs(normals) if dtype.kind == "u" else normals).astype(dtype)


def leaf(values: np.ndarray, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Leaf number `index` of a replica whose block holds `values`; a new array."""
    found = np.empty(int(np.prod(shape, dtype=np.int64)), values.dtype)
    for start, stop, where in _pieces(index, found.size):
        found[start:stop] = values[where]
    return found.reshape(shape)


class Exact:
    """The reduction in float64, against which results are held leaf by leaf."""

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
        """Largest |x - exact| / sum of magnitudes in leaf number `index`; inf for NaN."""
        flat, worst = got.reshape(-1), 0.0
        for start, stop, where in _pieces(index, flat.size):
            off = np.abs(flat[start:stop].astype(np.float64) - self._sum[where])
            worst = max(worst, float(np.max(off / self._size[where])))
            if not np.isfinite(off).all():
                return float("inf")
        return worst


def _pieces(index: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Start and stop in a leaf of `size` elements, and the part of the block that lies there."""
    offset, start = index * _STRIDE % BLOCK, 0
    while start < size:
        count = min(BLOCK - offset, size - start)
        yield start, start + count, slice(offset, offset + count)
        start, offset = start + count, 0
