"""Values made the same on every replica, inside a mapped program, or taken for it."""

from __future__ import annotations

from typing import Any

from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._spmd import check_replicas, gather
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
    return gather.broadcast(value, axes, source=source, scope=scope)


def same(value: Any, axis_name: str | tuple[str, ...] | None = None) -> Any:
    """Vouch that a value is the same on every replica, where no program shows it.

    Made for a number that the host returned (`jax.pure_callback`), a value read from a reference,
    or a sum in an order of your own: an output, a predicate, a parameter. Nothing is sent. On the
    first call for arguments of each shape, `jc.data_parallel` and `strategy.run` compare the
    copies, bit by bit, over processes too. Elsewhere, and in a program that was compiled by
    `.lower(...).compile()`, nobody does.

    Args:
      value: a pytree of arrays.
      axis_name: as in `all_reduce`.

    Returns:
      `value`, *invariant* over the axes. Its derivative is its cotangent's own. Cost: none; on a
      first call that of a digest.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is not an array.
      ReplicaDivergenceError: on a first call, replicas hold different bits; the line is named.

    Examples:
      >>> import jax, numpy as np, jaxcoll as jc
      >>> step = jc.data_parallel(lambda x: same(jax.lax.psum(x, "data") * 0.5))
      >>> step(np.ones(8)).tolist()
      [4.0]
    """
    scope = scope_here()
    return check_replicas.same(value, scope.over(axis_name, "jc.same"), scope.claims)
