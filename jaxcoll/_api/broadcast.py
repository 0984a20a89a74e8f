"""One replica's value for all, inside a mapped program."""

from __future__ import annotations

from typing import Any

from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._spmd import broadcast as _broadcast
from jaxcoll._spmd.scope import scope_here
from jaxcoll._spmd.shards import check_no_shards


def broadcast(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    source: int = 0,
    options: CommunicationOptions | None = None,
) -> Any:
    """Give every replica the value that one of them holds.

    Guarantee: the result equals the source's value, whatever the others hold; of a negative zero
    the sign may be lost, and all of a subnormal number (in float32 below 1.2e-38), as in any sum of
    XLA's. The cotangent of the source is the sum of the replicas' cotangents, that of the others
    zero; a float8_e8m0fnu, which has no zero, travels as its bits and has no cotangent.

    Args:
      value: any pytree of arrays, booleans and PRNG keys among them, equal on all replicas in
        structure and shape.
      axis_name: as in `all_reduce`.
      source: whose value; with several axes the outer counts slowest.
      options: as in `all_reduce`.

    Returns:
      A pytree like `value`, *invariant* over the axes. Cost: that of an `all_reduce`.

    Raises:
      NameError: an axis is not mapped here; the message lists those that are.
      ValueError: there is no such replica, a leaf holds no numbers, or an argument is invalid.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> jax.vmap(lambda v: broadcast(v, "data", source=1), axis_name="data")(x).tolist()
      [2.0, 2.0, 2.0]
    """
    scope = scope_here().merged(checked(options, exactly="broadcast"))
    axes = scope.over(axis_name, "jc.broadcast")
    check_no_shards(value, axes, "broadcast")
    return _broadcast.broadcast(value, axes, source=source, scope=scope)
