"""`all_reduce`, `psum` and `pmean`: reductions inside a mapped program."""

from __future__ import annotations

from typing import Any, get_args

import jax

from jaxcoll._collectives import reduce
from jaxcoll._collectives.scope import count, resolve_axes, scope_here
from jaxcoll._compression.format import check_any_coded
from jaxcoll._plan.checks import check_value_first, describe_type
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options


def all_reduce(
    reduce_op: ReduceOp | str,
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: reduce.Invariant = "error",
    residual: Any = None,
) -> Any:
    """Reduce every leaf of a pytree over the replicas along one or more mapped axes.

    Guarantee: the result is within n·eps of the float64 reference, relative to the sum of
    magnitudes. It keeps the structure and order of the tree. On an axis of size 1 it is `value`
    itself, without a collective. The cotangent of an `all_reduce` is the `all_reduce` of the
    cotangents with the same op.

    Args:
      reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or their names in any case. A MEAN is one sum and
        one division. A mean of integers has JAX's default float type; it wraps around where the
        sum of 32- or 64-bit integers does. A mean of float16 overflows only if it does not fit.
      value: any pytree of numeric arrays of any shapes and dtypes, with the same structure and
        shapes on all replicas. Empty arrays and None pass through. `IndexedSlices` are gathered:
        the result has the rows and indices of all replicas in replica order, with duplicates. A
        MEAN divides the rows.
      axis_name: an axis that `jax.shard_map`, `jax.pmap` or `jax.vmap` maps, or a tuple of mesh
        axes from outer (between hosts) to inner (within a host). None: the axes of the replicas,
        inside `jc.data_parallel` and `strategy.run`.
      options: how to pack and which collectives to use. Unset options come from the enclosing
        `data_parallel` or strategy, then from the automatic choice. `timeout_seconds` bounds a call
        of the enclosing step; without such a step it is refused.
      invariant: how to treat a leaf that a checked `shard_map` knows to be the same on every
        replica. "error": refuse it. "summed": it already is the sum over replicas, like autodiff's
        gradient of a replicated parameter; SUM returns it as it is, MEAN divides it. "replicated":
        every replica holds this value; SUM multiplies it, MEAN returns it as it is.
      residual: what a wire format rounded away before, from `jc.compression.residual(value)` or
        from the last call. It is added to this replica's values before they are sent.

    Returns:
      A pytree like `value`, *invariant* over the axes, so that `out_specs=P()` type-checks. With
      `residual`, a pair of it and the next residual, which is *varying*.
      Cost: 2(n-1)/n of the bytes leave each device, in one collective per pack before the
      compiler combines them. `jc.plan` shows steps and bytes.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf cannot be reduced (its path is named), an argument is invalid, or the
        residual belongs to another tree or number of replicas.
      AlreadyReducedError: a leaf is invariant and `invariant` is "error".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
      >>> jax.vmap(lambda v: all_reduce("sum", v, "data"), axis_name="data")(x)[0].tolist()
      [16.0, 20.0]
      >>> jax.vmap(lambda v: all_reduce("mean", v, "data"), axis_name="data")(x)[3].tolist()
      [4.0, 5.0]
    """
    if invariant not in get_args(reduce.Invariant):
        raise ValueError(
            f"`invariant` must be one of {', '.join(map(repr, get_args(reduce.Invariant)))}; "
            f"got {invariant!r}."
        )
    check_order(reduce_op, value)
    checked_options, op = check_options(options), ReduceOp.of(reduce_op)
    if checked_options.compression is not None:
        check_any_coded(checked_options.compression, value)
    scope = scope_here().merge(checked_options)
    axes = scope.choose_axes(axis_name, "jc.all_reduce")
    feedback = None
    if residual is not None:
        feedback = reduce.make_feedback(
            residual, value, resolve_axes(axes, "all_reduce"), "all_reduce"
        )
    return reduce.all_reduce(op, value, axes, scope=scope, invariant=invariant, feedback=feedback)


def psum(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: reduce.Invariant = "error",
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
    invariant: reduce.Invariant = "error",
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
    op: ReduceOp, value: Any, axis_name: Any, options: Any, invariant: reduce.Invariant
) -> Any:
    caller = "jc.psum" if op is ReduceOp.SUM else "jc.pmean"
    check_value_first(caller, value)
    axes = scope_here().choose_axes(axis_name, caller)
    n = count(resolve_axes(axes, caller))
    leaves, treedef = jax.tree.flatten(value)
    is_number = [isinstance(x, bool | int | float | complex) for x in leaves]
    rest = treedef.unflatten(
        [None if number else x for x, number in zip(leaves, is_number, strict=True)]
    )
    if not all(is_number) or not leaves:
        rest = all_reduce(op, rest, axes, options=options, invariant=invariant)
    arrays = iter(jax.tree.leaves(rest))
    return treedef.unflatten(
        [
            (x * n if op is ReduceOp.SUM else x * n / n) if number else next(arrays)
            for x, number in zip(leaves, is_number, strict=True)
        ]
    )


def check_order(reduce_op: Any, value: Any, caller: str = "jc.all_reduce") -> None:
    """Refuse swapped or missing arguments, and show the call that was probably meant."""
    if isinstance(reduce_op, ReduceOp | str) and not isinstance(value, ReduceOp | str):
        return
    lax_ = ' `jc.pmean(value, "data")` takes them in the order of `jax.lax`.' * ("all" in caller)
    raise ValueError(
        f'`{caller}` takes the operation first: `{caller}("mean", value, "data")`; got '
        f"{_show(reduce_op)} for it, and {_show(value)} for the value.{lax_}"
    )


def _show(x: Any) -> str:
    return repr(x) if isinstance(x, ReduceOp | str) else describe_type(x)
