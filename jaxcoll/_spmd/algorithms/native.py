"""The compiler's own collectives behind the algorithms' signature; the baseline of all others."""

from __future__ import annotations

import jax
from jax import lax


def reduce_scatter(shards: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Row `rank` of the sum of (n, ...) rows; TPUs make an all-reduce of scalar rows."""
    return lax.psum_scatter(shards, axes)


def all_gather(shard: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """All replicas' shards, of shape (count, ...); one collective."""
    return lax.all_gather(shard, axes)
