"""Clipping by the norm of a whole tree, of which every replica has a part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._spmd.arithmetic import wide
from jaxcoll._spmd.norms import global_norm
from jaxcoll._spmd.scope import Scope


def clipped(shards: Any, axes: tuple[str, ...], max_norm: float, *, scope: Scope) -> Any:
    """The same shards, scaled so that the norm of the whole tree is at most `max_norm`.

    Law: as `optax.clip_by_global_norm` of the whole tree, to rounding; squares are summed, and
    shards scaled, in float32, or wider where a leaf is: the norm need not fit into float16.

    Returns:
      Shards, *varying*. Cost: one all-reduce of a number.
    """
    if not jax.tree.leaves(shards):
        return shards
    norm = global_norm(shards, axes, scope=scope)
    within = norm < max_norm

    def scaled(x: jax.Array) -> jax.Array:
        exact = x.astype(wide(x.dtype))
        less = (exact / norm.astype(exact.dtype) * max_norm).astype(x.dtype)
        return lax.select(jnp.broadcast_to(within, x.shape), x, less)

    return jax.tree.map(scaled, shards)
