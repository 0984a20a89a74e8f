"""`broadcast` and `same`: make a value the same on every replica, or declare that it is."""

from __future__ import annotations

from typing import Any

from jaxcoll._collectives import check_replicas, gather
from jaxcoll._collectives.scope import scope_here
from jaxcoll._collectives.shards import check_no_shards
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.options import CommunicationOptions, check_options


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
    return gather.broadcast(value, axes, source=source, scope=scope)


def same(value: Any, axis_name: str | tuple[str, ...] | None = None) -> Any:
    """Declare that a value is the same on every replica where the program does not prove it.

    Use it for a number from a host callback (`jax.pure_callback`) or a hand-written sum, if it
    becomes an output, a predicate or a parameter. Nothing is sent. On the first call with arguments
    of each shape, `jc.data_parallel` and `strategy.run` compare the copies bit by bit, across
    processes too. There is no such check anywhere else, nor in a program compiled by
    `.lower(...).compile()`.

    Args:
      value: a pytree of arrays.
      axis_name: as in `all_reduce`.

    Returns:
      `value`, *invariant* over the axes. Its cotangent passes unchanged. Cost: none, but for a
      digest on first calls.

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
    check_value_first("jc.same", value)
    scope = scope_here()
    return check_replicas.same(value, scope.choose_axes(axis_name, "jc.same"), scope.claims)
