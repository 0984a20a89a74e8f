"""Rows of a data set: in which order an epoch reads them, and how some are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxcoll._plan.packs.leaves import flattened

_NO_ROWS = """\
`batches` expects rows that it can read in any order: a pytree of arrays with equally many rows, \
or one object with `len` and `[i]` that gives a row; got {got}. What gives one batch after another \
is for `jc.prefetch`."""


class Rows:
    """The rows of a source of `batches`, read by their numbers."""

    def __init__(self, source: Any) -> None:
        # An iterator would be a leaf, with a warning of JAX's.
        leaves = [source] if isinstance(source, Iterator) else jax.tree.leaves(source)
        self._items: Any = None
        if leaves and all(_is_column(leaf) for leaf in leaves):
            self._columns = jax.tree.map(lambda x: np.asarray(x) if _is_jax(x) else x, source)
            (first, column), *others = flattened(self._columns)[0]
            self._count = int(column.shape[0])
            for path, other in others:
                if other.shape[0] != self._count:
                    raise ValueError(
                        "`batches` expects arrays with equally many rows: "
                        f"source{first} has {self._count}, and source{path} {other.shape[0]}."
                    )
        elif len(leaves) == 1 and leaves[0] is source and _has(source, "__len__", "__getitem__"):
            self._items = source
            self._count = len(self._items)
        else:
            raise ValueError(_NO_ROWS.format(got=_shown(source, leaves)))

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: np.ndarray) -> Any:
        """These rows, in this order: a pytree of host arrays, never a view of the source."""
        if self._items is None:
            return jax.tree.map(lambda x: _array(x[numbers]), self._columns)
        rows = [self._items[i] for i in numbers.tolist()]
        return jax.tree.map(lambda *xs: np.stack([_array(x) for x in xs]), *rows)


def order(rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """The numbers of all rows in the order of an epoch; without a seed, that of the source."""
    if seed is None:
        return np.arange(rows)
    # Every NumPy has the same raw bits, but `Generator.permutation` may change with its version,
    # and processes would then read different rows.
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(rows), kind="stable")


def repeated(places: np.ndarray, real: int) -> tuple[np.ndarray, np.ndarray]:
    """The row for each place of a batch of which only `real` rows are real, and its weight.

    The last real row stands in for padding: a loss that is finite on all rows is finite on it,
    and NaN times the weight 0 would be NaN.
    """
    return np.minimum(places, real - 1), (places < real).astype(np.float32)


def rows_of(batch: Any, number: int) -> int:
    """How many rows a loader's batch has: at least one, equally many in all of its arrays."""
    found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(found) != 1 or found in ({()}, {(0,)}):
        shapes = ", ".join(sorted(str(np.shape(leaf)) for leaf in jax.tree.leaves(batch)))
        raise ValueError(
            f"`prefetch`: batch {number} of the loader must be a pytree of arrays with equally "
            f"many rows, at least one; its shapes are: {shapes or 'none'}."
        )
    return found.pop()[0]


def on_host(batches: Any) -> Iterator[Any]:
    """The batches of a loader as numpy arrays; global `jax.Array`s stay what they are."""
    for batch in batches:
        # Copies: the loader may write its next batch into the same memory, while this one waits or
        # is the memory of an array on CPU devices. PyTorch's tensors know no copying `np.array`.
        yield jax.tree.map(lambda x: x if _is_jax(x) else np.array(_array(x)), batch)


def _array(x: Any) -> np.ndarray:
    """An array of the host, which is not masked."""
    if isinstance(x, np.ma.MaskedArray):
        jax.typeof(x)  # refuses it, where `np.asarray` drops the mask
    return np.asarray(x)


def _is_column(leaf: Any) -> bool:
    return _has(leaf, "shape", "__getitem__") and len(leaf.shape) > 0


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


def _is_jax(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _shown(source: Any, leaves: list[Any]) -> str:
    if len(leaves) == 1 and leaves[0] is source:
        return type(source).__name__
    odd = [leaf for leaf in leaves if not _is_column(leaf)]
    what = f" in which one leaf is {type(odd[0]).__name__}, without rows" if odd else ", empty"
    return f"{type(source).__name__}{what}"
