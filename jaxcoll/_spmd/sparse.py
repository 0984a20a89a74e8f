"""How replicas bring the rows of their `IndexedSlices` together: by gathering, never by adding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import carried_dtype, flattened, where
from jaxcoll._spmd.arithmetic import Recipe, after
from jaxcoll._spmd.indexed_slices import IndexedSlices, unchecked


def is_sparse(leaf: Any) -> TypeGuard[IndexedSlices]:
    """Whether `leaf` is an IndexedSlices, which a reduction takes as a whole."""
    return isinstance(leaf, IndexedSlices)


def check_dense(tree: Any, words: str, error: type[Exception] = ValueError) -> None:
    """Refuse a tree with an IndexedSlices, in these words, where "{leaf}" stands for the first."""
    for path, leaf in flattened(tree, is_sparse)[0]:
        if is_sparse(leaf):
            raise error(words.format(leaf=where(path)))


def alike(slices: IndexedSlices) -> IndexedSlices:
    """Values and indices as arrays that vary over the same axes: no data moves.

    Rows that differ at indices that do not (or the reverse) are rows that differ.
    """
    parts = jnp.asarray(slices.values), jnp.asarray(slices.indices)
    over = sorted(frozenset().union(*map(_compat.varying_axes, parts)))
    values, indices = (_compat.as_varying(part, over) for part in parts)
    return unchecked(values, indices, slices.dense_shape)


def gathered(slices: IndexedSlices, recipe: Recipe) -> IndexedSlices:
    """The rows of every replica one after another: the sum, or the mean, of what they stand for.

    Returns:
      All replicas' rows in replica order, duplicates kept, *invariant*. Cost: two all-gathers,
      for which a device sends its rows and indices to n-1 others.
    """
    # Nothing is added up, so all that float16 needs is a division that does not underflow.
    wire = np.dtype(np.float32) if recipe.wire == np.float16 else recipe.wire
    rows = _from_all(slices.values, recipe).astype(wire)
    values = after(rows, dataclasses.replace(recipe, wire=wire))
    indices = _compat.as_invariant(_from_all(slices.indices, recipe), recipe.axes)
    return unchecked(values, indices, slices.dense_shape)


def _from_all(rows: jax.Array, recipe: Recipe) -> jax.Array:
    if not recipe.over:
        return rows
    if not rows.size:
        return jnp.concatenate([rows] * math.prod(map(lax.axis_size, recipe.over)))
    # `vmap` and `pmap` have no types to settle, and JAX 0.10 refuses to under `vmap`.
    typed = any(map(_compat.tracks_variance, recipe.over))
    found = lax.all_gather(
        rows.astype(carried_dtype(rows.dtype)),
        recipe.over,
        axis=0,
        tiled=True,
        to="invarying" if typed else "varying",
    )
    return found.astype(rows.dtype)
