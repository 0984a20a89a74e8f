"""Steps of hand-written algorithms: pass arrays on, swap them with a partner, turn and add rows."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat


def passed_on(
    array: jax.Array,
    axes: tuple[str, ...],
    distance: int,
    *,
    senders: int | None = None,
    receivers: int | None = None,
) -> jax.Array:
    """Return `array` of the replica `distance` before this one, around the circle of all.

    Only the first `senders` replicas send, and the first `receivers` receive (None: all).
    Unspecified where nobody sends, or to nobody. One step.
    """
    n = lax.axis_size(axes)
    pairs = [(i, (i + distance) % n) for i in range(n)]
    if not any(map(_compat.is_vmapped, axes)):
        # Under `vmap` nothing is sent, and JAX accepts whole permutations only.
        senders, receivers = senders or n, receivers or n
        pairs = [(i, j) for i, j in pairs if i < senders and j < receivers]
    return _permuted(array, axes, pairs)


def swapped(array: jax.Array, axes: tuple[str, ...], bit: int) -> jax.Array:
    """The `array` of the replica whose number differs in `bit` alone; *varying*. One step."""
    return _permuted(array, axes, [(i, i ^ bit) for i in range(lax.axis_size(axes))])


def exchanged(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Row i from replica i, which sends each replica one of its rows."""
    if any(map(_compat.is_vmapped, axes)):
        # JAX's rule for an array that the `vmap` does not map gives another shape.
        rows = jnp.where(lax.axis_index(axes) >= 0, rows, rows)
    return lax.all_to_all(rows, axes, split_axis=0, concat_axis=0)


def _permuted(
    array: jax.Array, axes: tuple[str, ...], pairs: Iterable[tuple[int, int]]
) -> jax.Array:
    order = _compat.in_mesh_order(axes)
    # The number along `order` of each replica, by its number along `axes`.
    grid = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in order])
    number = grid.transpose([order.index(a) for a in axes]).ravel().tolist()
    return lax.ppermute(array, order, [(number[i], number[j]) for i, j in pairs])


def turned(rows: jax.Array, by: jax.Array) -> jax.Array:
    """The same rows, beginning with row `by`, which is taken around the circle.

    `jnp.roll` would hold two copies of all of them beside the result.
    """
    n = len(rows)
    order = (lax.iota(jnp.int32, n) + by) % n
    return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)


def tree_sum(rows: jax.Array) -> jax.Array:
    """The sum of the rows in pairs, then of the pairs in pairs: ((0+1)+(2+3))+(4+...).

    An odd one at the end waits for the next round. `jnp.sum` would say nothing of the order, and
    XLA's CPU compiler is many times slower at it.
    """
    terms = [lax.squeeze(row, (0,)) for row in lax.split(rows, (1,) * len(rows))]
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


def copies(array: jax.Array, n: int) -> list[jax.Array]:
    """The array n times; the cotangents of the n are summed as by `tree_sum`."""
    if n == 1:
        return [array]
    left = 1 << (n - 1).bit_length() - 1
    halves = [(_compat.as_stored(array, backward=True), m) for m in (left, n - left)]
    return [copy for half, m in halves for copy in copies(half, m)]
