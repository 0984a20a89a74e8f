"""Reductions inside a mapped program: read the scope, then hand down."""

from __future__ import annotations

from typing import Any, get_args

import jax

from jaxcoll._plan.checks import kind_of
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._spmd import reduce
from jaxcoll._spmd.scope import bound_axes, count, scope_here
from jaxcoll._wire.format import check_any_coded


def all_reduce(
    reduce_op: ReduceOp | str,
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: reduce.Invariant = "error",
    residual: Any = None,
) -> Any:
    """Reduce every leaf of a pytree over the replicas along one or several mapped axes.

    Guarantee: the result equals the float64 reference within n·eps of the sum of magnitudes, keeps
    the tree's order and structure, and, for n replicas on one axis of size 1, is the value
    itself without a collective. The cotangent of `all_reduce` is the `all_reduce` of the
    cotangents with the same op.

    Args:
      reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or their names in any case. A MEAN is one sum
        and one division; of integers it has JAX's default float type, and 32- and 64-bit ones
        wrap around where their sum does; of float16 it does not overflow where the mean fits.
      value: any pytree of numeric arrays, of any shapes and dtypes, equal on all replicas in
        structure and shape. Empty arrays and None pass through. An `IndexedSlices` in it is
        reduced by gathering: every replica's rows and indices, duplicates kept, one after
        another in replica order; a MEAN divides the rows.
      axis_name: the axis that `jax.shard_map`, `jax.pmap` or `jax.vmap` maps; or a tuple of
        mesh axes, outer (between hosts) to inner (within a host). None: inside `jc.data_parallel`
        and `strategy.run` the axes of the replicas.
      options: how to pack and what carries it; unset ones come from the enclosing
        `data_parallel` or strategy, then from the automatic choice. Their `timeout_seconds`
        bounds the call of that step, or is refused where there is none.
      invariant: what to do with a leaf that a checked `shard_map` knows to be the same on every
        replica. "error": refuse it. "summed": it is the sum over replicas already (as autodiff
        makes of a replicated parameter's gradient); SUM leaves it, MEAN divides. "replicated":
        every replica holds this value; SUM multiplies it, MEAN leaves it.
      residual: of `jc.compression.residual(value)`, or of the last call: what a wire format
        has rounded away, and is added to this replica's values before they are sent.

    Returns:
      A pytree like `value`, *invariant* over the axes, so that `out_specs=P()` type-checks. With
      `residual`, a pair of it and of the next residual, *varying*.
      Cost: 2(n-1)/n of the bytes leave each device, one collective a pack before the
      compiler combines them; see `jc.plan` for steps and bytes.

    Raises:
      NameError: an axis is not mapped here; the message lists those that are.
      ValueError: a leaf cannot be reduced (its path is named), an argument is invalid, or the
        residual is of another tree or number of replicas.
      AlreadyReducedError: a leaf is invariant and `invariant` was not given.

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
    own_options, op = checked(options), ReduceOp.of(reduce_op)
    if own_options.compression is not None:
        check_any_coded(own_options.compression, value)
    scope = scope_here().merged(own_options)
    axes = scope.over(axis_name, "jc.all_reduce")
    feedback = None
    if residual is not None:
        feedback = reduce.feedback_of(residual, value, bound_axes(axes, "all_reduce"), "all_reduce")
    return reduce.all_reduce(op, value, axes, scope=scope, invariant=invariant, feedback=feedback)


def psum(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: reduce.Invariant = "error",
) -> Any:
    """Return the sum over the replicas: `jax.lax.psum`, packed as `options` say.

    Args:
      value: a pytree as in `all_reduce`. Python numbers are the same on every replica and are
        multiplied, so that `psum(1)` counts replicas, without anything sent.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`.
      invariant: as in `all_reduce`.

    Returns:
      A pytree like `value`, *invariant* over the axes. Cost: as of `all_reduce`.

    Raises:
      ValueError: as in `all_reduce`.
      NameError: as in `all_reduce`.
      AlreadyReducedError: as in `all_reduce`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> jax.vmap(lambda v: psum(v, "data"), axis_name="data")(jnp.arange(3.0)).tolist()
      [3.0, 3.0, 3.0]
    """
    return _in_laxs_order(ReduceOp.SUM, value, axis_name, options, invariant)


def pmean(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: reduce.Invariant = "error",
) -> Any:
    """Return the mean over the replicas: `jax.lax.pmean`, packed as `options` say.

    Args:
      value: a pytree as in `all_reduce`. Python numbers are their own mean.
      axis_name: as in `all_reduce`.
      options: as in `all_reduce`.
      invariant: as in `all_reduce`.

    Returns:
      A pytree like `value`, *invariant* over the axes. Cost: as of `all_reduce`.

    Raises:
      ValueError: as in `all_reduce`.
      NameError: as in `all_reduce`.
      AlreadyReducedError: as in `all_reduce`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> jax.vmap(lambda v: pmean(v, "data"), axis_name="data")(jnp.arange(3.0)).tolist()
      [1.0, 1.0, 1.0]
    """
    return _in_laxs_order(ReduceOp.MEAN, value, axis_name, options, invariant)


def _in_laxs_order(
    op: ReduceOp, value: Any, axis_name: Any, options: Any, invariant: reduce.Invariant
) -> Any:
    caller = "jc.psum" if op is ReduceOp.SUM else "jc.pmean"
    if isinstance(value, str | ReduceOp):
        raise ValueError(
            f"`{caller}` takes the value first and then the axis, as `jax.lax` does: "
            f'`{caller}(value, "data")`; got {value!r} for the value.'
        )
    axes = scope_here().over(axis_name, caller)
    n = count(bound_axes(axes, caller))
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
    """Refuse swapped or missing arguments with the line that is meant."""
    if isinstance(reduce_op, ReduceOp | str) and not isinstance(value, ReduceOp | str):
        return
    lax_ = ' In `jax.lax`\'s order there is `jc.pmean(value, "data")`.' * ("all" in caller)
    raise ValueError(
        f'`{caller}` names the operation first: `{caller}("mean", value, "data")`; got '
        f"{_shown(reduce_op)} for it, and {_shown(value)} for the value.{lax_}"
    )


def _shown(x: Any) -> str:
    return repr(x) if isinstance(x, ReduceOp | str) else kind_of(x)
