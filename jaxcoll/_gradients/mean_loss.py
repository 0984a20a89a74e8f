"""A function that returns the mean of the replicas' losses, with a custom derivative."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxcoll import _compat
from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.pipeline import divide_wide
from jaxcoll._collectives.scope import (
    Differentiation,
    Scope,
    differentiated,
    loss_axes,
    resolve_axes,
    scope_here,
)
from jaxcoll._gradients.gradient import Differentiator, positional_names
from jaxcoll._gradients.loss import WeightedLoss, value_and_weight
from jaxcoll._gradients.proof.retrace import Traced, lift_captured, trace
from jaxcoll._gradients.sync_in_backward import reduce_backward
from jaxcoll._gradients.value_and_grad import make_gradient
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import check_not_empty, refuse_tied

CALLER = "jc.mean_loss"

_CAPTURED = f"""\
`{CALLER}`: the loss captures a value with respect to which it is differentiated. In a checked \
`shard_map` (check_vma=True), pass it as an argument of the loss."""


def mean_loss(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Return the mean of the replicas' losses as a function that can be differentiated.

    Use it with algorithms that differentiate a function themselves: a line search, L-BFGS, an
    implicit step. `jax.grad` of `lax.pmean(loss)` is each replica's own gradient, so replicas would
    search in different directions. This function has the value and derivative of one device.

    Args:
      fun: the loss of one replica's share of the batch, as in `value_and_grad`; it must not reduce
        the loss.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      options: as in `all_reduce`, for the gradients.

    Returns:
      A function with `fun`'s arguments that returns a scalar, *invariant* over the axes. It has
      forward- and reverse-mode derivatives with respect to all that is the same on every replica:
      arguments and, except in a checked `shard_map`, captured values; and of any order, each with
      respect to the same arguments. (Unchecked, a derivative of the gradient with respect to others
      is each replica's own; `jc.sync_in_backward` of these makes it the mean.) Cost: an
      `all_reduce` of one number; differentiated, one `all_reduce` of value and gradients together.

    Raises:
      NameError: an axis is not mapped here.
      TypeError: the loss is not a scalar.
      ValueError: it is differentiated with respect to a value that differs between replicas, or to
        a captured one in a checked `shard_map`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> loss = mean_loss(lambda w, x: jnp.mean(w * x), "data")
      >>> shares = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> step = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0), axis_name="data")
      >>> value, grad = step(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([5.0, 5.0], [2.5, 2.5])
    """
    given = check_options(options)
    if not callable(fun):
        raise ValueError(f"`{CALLER}` expects a function, the loss; got {describe_type(fun)}.")

    @functools.wraps(fun, updated=())
    def mean(*args: Any, **kwargs: Any) -> Any:
        here = scope_here()
        axes = tuple(resolve_axes(here.choose_axes(axis_name, CALLER), CALLER))
        refuse_tied((args, kwargs), CALLER)
        check_not_empty(CALLER, (args[1:], kwargs))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = treedef.unflatten([x if _is_array(x) else None for x in leaves])
        inputs = [*arrays[0], *arrays[1].values()]

        def loss(*inputs: Any) -> tuple[Any, Any]:
            traced_leaves = iter(jax.tree.leaves(inputs))
            all_leaves = [next(traced_leaves) if _is_array(x) else x for x in leaves]
            args, kwargs = treedef.unflatten(all_leaves)
            value, weight = value_and_weight(fun(*args, **kwargs), CALLER)
            return jnp.asarray(value), weight

        # JAX may trace a custom derivative after the function around it has returned. So every
        # array that the loss uses must be an operand, also those that it captures.
        with differentiated(Differentiation(axes, given, enclosing=loss_axes())):
            program, captured = lift_captured(trace(loss, *_vary(inputs, axes)))
        signature = _signature(fun, len(args), [*arrays[1]], len(captured))
        traced = _TracedLoss(program, len(inputs), axes, here, given, signature)
        average = jax.custom_jvp(traced.average)
        average.defjvp(functools.partial(traced.differentiate, average), symbolic_zeros=True)
        return average(*inputs, *captured)

    return mean


@dataclasses.dataclass(frozen=True, eq=False)
class _TracedLoss:
    """A loss as a function of every array that it uses: its arguments, then what it captures."""

    program: Traced
    passed: int  # the number of arguments among the operands
    axes: tuple[str, ...]
    scope: Scope
    options: CommunicationOptions
    signature: inspect.Signature  # names the operands, for error messages

    def evaluate(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """Compute this replica's loss, and its weight or None."""
        # What is captured keeps the type that the trace met.
        arguments = _vary(operands[: self.passed], self.axes)
        return self.program.result(self.program.outputs(*arguments, *operands[self.passed :]))

    def average(self, *operands: Any) -> Any:
        value, weight = self.evaluate(operands)
        exactly = self.scope.merge(self.options).exactly
        axes = resolve_axes(self.axes, "all_reduce")
        if weight is None:
            return AllReduce(ReduceOp.MEAN, axes, exactly).reduce(value)
        pair = AllReduce(ReduceOp.SUM, axes, exactly, repeats=True).reduce((value, weight))
        return divide_wide(pair[0], by=pair[1])

    def differentiate(
        self, average: Callable[..., Any], primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        """Compute the mean and its derivative along the tangents, by the gradient of the mean."""
        leaves = [*map(jax.tree.leaves, tangents)]
        argnums = [i for i, ts in enumerate(leaves) if not all(map(_is_zero, ts))]
        if not argnums:
            value = average(*primals)
            return value, jnp.zeros_like(value)
        if _compat.types_tracked() and argnums[-1] >= self.passed:
            raise ValueError(_CAPTURED)

        def local(*operands: Any) -> Any:
            value, weight = self.evaluate(operands)
            return value if weight is None else WeightedLoss(value, weight)

        local.__signature__ = self.signature  # pyright: ignore[reportFunctionMemberAccess]
        operands = dict(enumerate(primals))
        if not _compat.types_tracked():  # else autodiff sums over replicas by itself
            # A derivative of the gradients is a mean over the replicas, too.
            learned = {i: primals[i] for i in argnums}
            scope = self.scope.merge(self.options)
            operands |= reduce_backward(learned, ReduceOp.MEAN, self.axes, scope)
        gradient = Differentiator(local, CALLER, ReduceOp.MEAN, argnums, False, False, False)
        take = make_gradient(gradient, self.axes, self.options, lambda: self.scope)
        value, grads = take(*operands.values())
        # The derivative along the tangents is the product with the gradient, linear in them: JAX
        # transposes it for reverse mode, and the gradient itself can be differentiated again.
        along = (t for i in argnums for t in leaves[i])
        pairs = zip(jax.tree.leaves(grads), along, strict=True)
        products = (jnp.sum(g * t) for g, t in pairs if not _is_zero(t))
        tangent = sum(products, jnp.zeros((), value.dtype))
        return value, jnp.real(tangent).astype(value.dtype)


def _vary(arrays: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    if not _compat.types_tracked():
        return [*arrays]
    return jax.tree.map(lambda x: _compat.cast_varying(jnp.asarray(x), axes), [*arrays])


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)


def _is_zero(tangent: Any) -> bool:
    """True if a tangent is zero because its operand is not differentiated."""
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


def _signature(
    fun: Callable[..., Any], positional: int, keywords: Sequence[str], captured: int
) -> inspect.Signature:
    """Name the operands, for error messages."""
    names = positional_names(fun)[:positional]
    names += [f"args_{i}" for i in range(len(names), positional)]
    names += [*keywords, *(f"captured_{i}" for i in range(captured))]
    return inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names]
    )
