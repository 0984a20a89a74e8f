"""Building blocks of hand-written algorithms: pass arrays on, swap them, rotate and add rows."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat


def pass_on(
    array: jax.Array,
    axes: tuple[str, ...],
    distance: int,
    *,
    senders: int | None = None,
    receivers: int | None = None,
) -> jax.Array:
    """Send `array` to the replica `distance` further around the ring; return what arrives.

    Only the first `senders` replicas send, and the first `receivers` receive (None: all). The
    result is unspecified where nothing arrives. One step.
    """
    n = lax.axis_size(axes)
    pairs = [(i, (i + distance) % n) for i in range(n)]
    if not any(map(_compat.is_vmapped, axes)):
        # Under `vmap` nothing is sent, and JAX accepts only whole permutations.
        senders, receivers = senders or n, receivers or n
        pairs = [(i, j) for i, j in pairs if i < senders and j < receivers]
    return _permute(array, axes, pairs)


def swap(array: jax.Array, axes: tuple[str, ...], bit: int) -> jax.Array:
    """Swap `array` with the replica whose rank differs only in `bit`; *varying*. One step."""
    return _permute(array, axes, [(i, i ^ bit) for i in range(lax.axis_size(axes))])


def exchange(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-to-all: send row i to replica i; return one row from each replica, in their order."""
    if any(map(_compat.is_vmapped, axes)):
        # For an array that the `vmap` does not map, JAX's rule returns another shape.
        rows = jnp.where(lax.axis_index(axes) >= 0, rows, rows)
    return lax.all_to_all(rows, axes, split_axis=0, concat_axis=0)


def _permute(
    array: jax.Array, axes: tuple[str, ...], pairs: Iterable[tuple[int, int]]
) -> jax.Array:
    order = _compat.order_by_mesh(axes)
    # Each replica's rank along `order`, by its rank along `axes`
    grid = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in order])
    rank = grid.transpose([order.index(a) for a in axes]).ravel().tolist()
    return lax.ppermute(array, order, [(rank[i], rank[j]) for i, j in pairs])


def rotate(rows: jax.Array, by: jax.Array) -> jax.Array:
    """Rotate the rows, so that row `by` (modulo their number) comes first.

    `jnp.roll` would need two more copies of all rows besides the result.
    """
    n = len(rows)
    order = (lax.iota(jnp.int32, n) + by) % n
    return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)


def tree_sum(rows: jax.Array) -> jax.Array:
    """Sum the rows in pairs, then pairs of pairs, and so on: ((0+1)+(2+3))+(4+...).

    An odd term at the end waits for the next round. `jnp.sum` does not specify the order, and is
    many times slower with XLA's CPU compiler.
    """
    terms = [lax.squeeze(row, (0,)) for row in lax.split(rows, (1,) * len(rows))]
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


def copies(array: jax.Array, n: int) -> list[jax.Array]:
    """Return the array n times; their cotangents are summed in the order of `tree_sum`."""
    if n == 1:
        return [array]
    left = 1 << (n - 1).bit_length() - 1
    halves = [(_compat.store(array, only_cotangent=True), m) for m in (left, n - left)]
    return [copy for half, m in halves for copy in copies(half, m)]
