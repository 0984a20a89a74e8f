"""`psum` and `pmean`: the arguments of `jax.lax`, and its meaning of Python numbers."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll._collectives.all_reduce import Invariant, all_reduce
from jaxcoll._collectives.scope import count, resolve_axes, scope_here
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.options import CommunicationOptions, ReduceOp


def psum(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: Invariant = "error",
) -> Any:
    """Return the sum over the replicas: `jax.lax.psum`, packed according to `options`.

    Args:
      value: a pytree as in `all_reduce`. Python numbers are multiplied by the number of replicas
        without a collective, so `psum(1)` counts replicas.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`.
      invariant: as in `all_reduce`.

    Returns:
      A pytree like `value`, *invariant* over the axes. Cost: as in `all_reduce`.

    Raises:
      ValueError: as in `all_reduce`.
      NameError: as in `all_reduce`.
      AlreadyReducedError: as in `all_reduce`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> jax.vmap(lambda v: psum(v, "data"), axis_name="data")(jnp.arange(3.0)).tolist()
      [3.0, 3.0, 3.0]
    """
    return _reduce_like_lax(ReduceOp.SUM, value, axis_name, options, invariant)


def pmean(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: Invariant = "error",
) -> Any:
    """Return the mean over the replicas: `jax.lax.pmean`, packed according to `options`.

    Args:
      value: a pytree as in `all_reduce`. The mean of a Python number is the number.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`.
      invariant: as in `all_reduce`.

    Returns:
      A pytree like `value`, *invariant* over the axes. Cost: as in `all_reduce`.

    Raises:
      ValueError: as in `all_reduce`.
      NameError: as in `all_reduce`.
      AlreadyReducedError: as in `all_reduce`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> jax.vmap(lambda v: pmean(v, "data"), axis_name="data")(jnp.arange(3.0)).tolist()
      [1.0, 1.0, 1.0]
    """
    return _reduce_like_lax(ReduceOp.MEAN, value, axis_name, options, invariant)


def _reduce_like_lax(
    op: ReduceOp, value: Any, axis_name: Any, options: Any, invariant: Invariant
) -> Any:
    caller = "jc.psum" if op is ReduceOp.SUM else "jc.pmean"
    check_value_first(caller, value)
    axes = scope_here().choose_axes(axis_name, caller)
    n = count(resolve_axes(axes, caller))
    leaves, treedef = jax.tree.flatten(value)
    # A Python number is the same on all replicas: its sum is known, and nothing is sent for it.
    numbers = [isinstance(x, bool | int | float | complex) for x in leaves]
    rest = treedef.unflatten([None if k else x for x, k in zip(leaves, numbers, strict=True)])
    if not all(numbers) or not leaves:
        rest = all_reduce(op, rest, axes, options=options, invariant=invariant)
    arrays, known = iter(jax.tree.leaves(rest)), n if op is ReduceOp.SUM else 1.0
    sums = [x * known if k else next(arrays) for x, k in zip(leaves, numbers, strict=True)]
    return treedef.unflatten(sums)
