"""The compiler's own collectives behind the algorithms' signature; the baseline of all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def all_reduce(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of arrays; one collective."""
    return lax.psum(_unfolded(array, axes) if jnp.iscomplexobj(array) else array, axes)


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Row `rank` of the sum of (n, ...) rows; TPUs make an all-reduce of scalar rows."""
    return lax.psum_scatter(_unfolded(shards, axes) if jnp.iscomplexobj(shards) else shards, axes)


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """All replicas' shards, of shape (count, ...); one collective."""
    return lax.all_gather(shard, axes)


def _unfolded(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return a complex array, which is no constant to the compiler.

    XLA's CPU compiler aborts on the sum of a complex constant, such as the gradient of a parameter
    that the loss does not use. It drops an optimization barrier before that.
    """
    never = lax.axis_index(axes) < 0  # as no compiler knows
    return jnp.where(never, -array, array)
