"""`broadcast`: give every replica the value of one of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.pipeline import make_sendable, restore_type
from jaxcoll._collectives.scope import (
    Scope,
    count,
    require_array,
    resolve_axes,
    scope_here,
    show_axes,
)
from jaxcoll._collectives.shards import check_no_shards
from jaxcoll._plan.checks import as_index, check_value_first
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import flatten_with_paths, where


def broadcast(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    source: int = 0,
    options: CommunicationOptions | None = None,
) -> Any:
    """Give every replica the value of one of them.

    Guarantee: the result equals the source's value, whatever the other replicas hold. As in every
    sum of XLA, a negative zero may lose its sign, and subnormal numbers (in float32 below 1.2e-38)
    may become zero. The cotangent of the source is the sum of the replicas' cotangents; that of the
    other replicas is zero. A float8_e8m0fnu has no zero, so it travels as bits, without cotangent.

    Args:
      value: any pytree of arrays, including booleans and PRNG keys, with the same structure and
        shapes on all replicas.
      axis_name: as in `all_reduce`.
      source: index of the replica to copy from; with several axes, the outer one varies slowest.
      options: as in `all_reduce`.

    Returns:
      A pytree like `value`, *invariant* over the axes. Cost: that of an `all_reduce`.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: there is no replica `source`, a leaf is not numeric, or an argument is invalid.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> jax.vmap(lambda v: broadcast(v, "data", source=1), axis_name="data")(x).tolist()
      [2.0, 2.0, 2.0]
    """
    check_value_first("jc.broadcast", value)
    scope = scope_here().merge(check_options(options, exactly="broadcast"))
    axes = scope.choose_axes(axis_name, "jc.broadcast")
    check_no_shards(value, axes, "broadcast")
    return send_tree(value, axes, source=source, scope=scope)


def send_tree(value: Any, axis_name: str | tuple[str, ...], *, source: int, scope: Scope) -> Any:
    """Return the tree of replica `source`, *invariant* over the axes; see `jc.broadcast`."""
    axes = resolve_axes(axis_name, "broadcast")
    index = as_index(source)
    if index is None or not 0 <= index < count(axes):
        raise ValueError(
            f"`broadcast` expects `source` to be an integer from 0 to {count(axes) - 1}, the "
            f"number of a replica along {show_axes(axes)}; got {source!r}."
        )
    # A sum with zeros from the others, for up to twice the bytes: JAX's own broadcast works on GPUs
    # only, and would ignore the options.
    is_source = lax.axis_index(tuple(axes)) == index
    flat, treedef = flatten_with_paths(value)
    who = "`broadcast` cannot send {}"
    leaves = [require_array(x, who.format(where(path)), "an array of numbers") for path, x in flat]
    masked = [_mask(is_source, leaf) for leaf in leaves]
    summed = AllReduce(ReduceOp.SUM, axes, scope.exactly).reduce(masked)
    return treedef.unflatten(map(_unmask, summed, leaves))


def _mask(is_source: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x` on the source and zeros on all other replicas, in a type that sums exactly."""
    if _lacks_zero(x.dtype):
        x = lax.bitcast_convert_type(x, jnp.uint8)
    x = x.astype(np.uint8) if x.dtype == np.bool_ else make_sendable(x)
    # Not a product with 0 or 1: what others hold may be infinite, and 0·∞ is NaN.
    return jnp.where(is_source, x, jnp.zeros_like(x))


def _unmask(total: jax.Array, like: jax.Array) -> jax.Array:
    if _lacks_zero(like.dtype):
        return lax.bitcast_convert_type(total, like.dtype)
    return restore_type(total, like)


def _lacks_zero(dtype: np.dtype) -> bool:
    """Return whether a numeric type has no zero: float8_e8m0fnu has only powers of two."""
    return jnp.issubdtype(dtype, np.number) and bool(np.zeros((), dtype) != 0)
