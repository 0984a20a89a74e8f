"""A value that a user vouches for: the same on every replica."""

from __future__ import annotations

from typing import Any

from jaxcoll._spmd import same as _same
from jaxcoll._spmd.scope import scope_here


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
    return _same.same(value, scope.over(axis_name, "jc.same"), scope.claims)
