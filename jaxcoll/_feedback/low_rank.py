"""The arithmetic of PowerSGD: orthonormal columns, scaled ones, and products of factors."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._spmd.wire_formats.blocks import largest

_NOTHING = np.float32(1e-6)
"""A column of which projections leave less, of a largest number of 1, is rounding alone."""


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product in float32, which accelerators would round to fewer bits."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def orthonormal(matrices: Sequence[jax.Array]) -> list[jax.Array]:
    """For each matrix of shape (m, r) orthonormal columns that span its own.

    A column that depends on those before it becomes zero. Anything not finite makes all of its
    matrix NaN. By one loop for all matrices, so that programs stay small: matrices of one shape
    go side by side.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(i)
    stacked = [jnp.stack([_scaled(matrices[i].T) for i in members]) for members in alike.values()]
    zeros = [_compat.zeros_like_aval(jax.typeof(rows), rows.dtype) for rows in stacked]

    def turn(i: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
        return [_next(i, rows, before) for rows, before in zip(stacked, found, strict=True)]

    found = lax.fori_loop(0, stacked[0].shape[1], turn, zeros)
    by_place = {
        i: rows[k].T
        for members, rows in zip(alike.values(), found, strict=True)
        for k, i in enumerate(members)
    }
    return [by_place[i] for i in range(len(matrices))]


def _next(i: jax.Array, rows: jax.Array, before: jax.Array) -> jax.Array:
    """`before`, of shape (k, r, m), and in it row `i` of `rows`: Gram-Schmidt, twice."""
    row = lax.dynamic_index_in_dim(rows, i, 1)
    for _ in range(2):  # rows from `i` on are zero still
        row = row - product(product(row, before.swapaxes(1, 2)), before)
    norm = jnp.sqrt((row * row).sum(-1, keepdims=True))
    row = jnp.where(norm <= _NOTHING, np.float32(0), row / norm)  # of NaN: NaN
    return lax.dynamic_update_index_in_dim(before, row, i, 1)


def refreshed(factor: jax.Array, before: jax.Array) -> jax.Array:
    """A right factor for the next call, its columns scaled; one of zeros is as it was before.

    Otherwise a column of a matrix that was zero once would send nothing ever after, and squares of
    gradients would underflow.
    """
    columns = _scaled(factor.T).T
    return jnp.where((columns == 0).all(0), before, columns)


def _scaled(rows: jax.Array) -> jax.Array:
    """Rows with a largest magnitude of 1, or of zeros: no square over- or underflows."""
    most = lax.bitcast_convert_type(largest(rows), jnp.float32)[:, None]
    # Compilers multiply by reciprocals, and that of 2e38 is flushed to zero.
    less = jnp.where(most > np.float32(1e30), np.float32(2.0**-40), np.float32(1))
    return jnp.where(most < np.float32(1e-34), np.float32(0), rows * less / (most * less))
