"""The compiler's own collectives, as an algorithm: the baseline of all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def all_reduce(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over replicas; one collective."""
    return lax.psum(_prevent_folding(array, axes) if jnp.iscomplexobj(array) else array, axes)


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return row `rank` of the sum of (n, ...) rows; TPUs use an all-reduce for scalar rows."""
    return lax.psum_scatter(
        _prevent_folding(shards, axes) if jnp.iscomplexobj(shards) else shards, axes
    )


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Return all replicas' shards, of shape (count, ...); one collective."""
    return lax.all_gather(shard, axes)


def _prevent_folding(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return a complex array such that the compiler cannot know that it is constant.

    XLA's CPU compiler aborts on the sum of a complex constant, such as the gradient of a parameter
    that the loss does not use. It drops optimization barriers before that point.
    """
    never = lax.axis_index(axes) < 0  # always False, but no compiler knows that
    return jnp.where(never, -array, array)
