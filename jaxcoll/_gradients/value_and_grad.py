"""`value_and_grad` and `grad`: the gradient of the loss over all replicas."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxcoll._collectives.scope import Differentiation, Scope, loss_axes, resolve_axes, scope_here
from jaxcoll._gradients.gradient import Differentiator
from jaxcoll._gradients.loss import Differentiated, check_differentiable
from jaxcoll._gradients.proof.retrace import trace_call
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import check_not_empty, refuse_tied


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Return `jax.value_and_grad` of the loss over all replicas, given the loss of one share.

    Guarantee: n devices equal one device. Value and gradient are those of `fun` on the whole batch,
    to rounding, under `pmap` and under `shard_map` with or without checks. This holds for a MEAN of
    equal shares, for a SUM of any shares, and, if `fun` returns a `WeightedLoss`, for a mean
    weighted by tokens or real examples. The gradient of every leaf is reduced, except those of
    `Shards`: `fun` gathers them by `jc.all_gather` or `jc.scan_layers`, and the derivative of the
    gather returns reduced gradients in Shards. Every other leaf must be the same on every replica.
    A leaf that differs (an expert, the batch) is refused by name in a `data_parallel` step and in a
    checked `shard_map`; differentiate it by `jax.grad`.

    Args:
      fun: the loss of one replica's share of the batch, a scalar or a `WeightedLoss`. It need not
        reduce over `axis_name`; in a checked `shard_map`, where types show it, it must not.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: True if `fun` returns `(loss, aux)`.
      scatter: give each replica only 1/n of the gradients, as `Shards`, for the `update` of a
        `sharded_optimizer`.
      feedback: add what a wire format (`options.compression`) rounds away to the next gradients.
        The function then takes one more keyword argument, `residual`, at first
        `jc.compression.residual(params)`, and returns the next residual as its last result.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`.
      Value and gradients are *invariant* over the axes; gradients in `Shards` are *varying*. `aux`
      is this replica's (*varying*), but each `WeightedMean` and `Total` in it becomes a number over
      all replicas (*invariant*). Cost: one `all_reduce` that carries gradients, loss and metrics;
      with `scatter`, a `reduce_scatter` of the gradients and an `all_reduce` of the rest.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a WeightedLoss comes with SUM or `Shards` with `scatter`, a leaf is known to
        differ between replicas, or an argument is invalid (a wrong `fun` or `argnums` at once).
      TypeError: the loss is not a scalar, or is a tuple without `has_aux`.
      AlreadyReducedError: in a checked `shard_map`, `fun` has reduced the loss.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> step = value_and_grad(lambda w, x: jnp.mean(w * x), "data")
      >>> shares = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> value, grad = jax.vmap(step, in_axes=(None, 0), axis_name="data")(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([5.0, 5.0], [2.5, 2.5])
    """
    op = ReduceOp.of(reduce_op)
    loss = Differentiator(fun, "jc.value_and_grad", op, argnums, has_aux, scatter, feedback)
    return make_gradient(loss, axis_name, check_options(options))


def grad(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Like `value_and_grad`, but neither reduce nor return the value.

    Args:
      fun: the loss of one replica's share of the batch.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate.
      has_aux: True if `fun` returns `(loss, aux)`.
      scatter: as in `value_and_grad`.
      feedback: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `grads`, or `(grads, aux)`. Gradients are
      *invariant* over the axes, those in `Shards` *varying*; `aux` is *varying*.
    """
    op = ReduceOp.of(reduce_op)
    loss = Differentiator(fun, "jc.grad", op, argnums, has_aux, scatter, feedback, with_value=False)
    return make_gradient(loss, axis_name, check_options(options))


def make_gradient(
    gradient: Differentiator,
    axis_name: Any,
    options: CommunicationOptions,
    scope: Callable[[], Scope] = scope_here,
) -> Callable[..., Any]:
    """Implement `jc.value_and_grad`, `jc.grad` and `jc.accumulate`."""
    caller = gradient.caller

    @functools.wraps(gradient.fun, updated=())
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        here = scope()
        axes = resolve_axes(here.choose_axes(axis_name, caller), caller)
        residual = kwargs.pop("residual", None) if gradient.feedback else None
        if gradient.feedback and residual is None:
            raise ValueError(
                f"`{caller}` with feedback=True expects the keyword argument `residual`, besides "
                "those of the loss: first what `jc.compression.residual(params)` returns, then "
                "what the last call returned."
            )
        refuse_tied((args, kwargs), caller)
        check_differentiable(gradient.leaves(args), caller)
        learned = gradient.positions(args)
        check_not_empty(caller, ([x for i, x in enumerate(args) if i not in learned], kwargs))
        inside = Differentiation(tuple(axes), options, enclosing=loss_axes())

        def local_gradient() -> Differentiated:
            return gradient.local(axes, inside, args, kwargs)

        program = trace_call(local_gradient)
        return gradient.reduce(program, args, axes, here.merge(options), residual)

    if gradient.feedback:
        with contextlib.suppress(TypeError, ValueError):  # a C function may have no signature
            signature = inspect.signature(gradient.fun)
            more = inspect.Parameter("residual", inspect.Parameter.KEYWORD_ONLY, default=None)
            others = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
            signature = signature.replace(parameters=[*others, more])
            differentiate.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return differentiate
