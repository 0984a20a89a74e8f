"""A scan over sharded layers as one differentiable function: its forward and backward loops.

Each layer's parameters are gathered before it runs; its gradients are reduce-scattered after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from jaxcoll import _compat
from jaxcoll._collectives.scope import differentiation, resolve_axes, scope_here, show_axes
from jaxcoll._gradients.layers.exchange import Arrays, Traffic
from jaxcoll._gradients.layers.layer_program import (
    Residuals,
    UserLayer,
    flatten_carry,
    is_floating,
    trace_forward,
)
from jaxcoll._gradients.layers.schedule import Schedule
from jaxcoll._gradients.layers.stack import CALLER, make_stack
from jaxcoll._plan.checks import count, refuse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options

_PARTLY = """\
`scan_layers` over {axes}, inside the loss of `jc.value_and_grad` or its like over {outer}: both \
must reduce gradients over the same axes. Give both the same `axis_name`; if a leaf is cut over \
only some of the axes, say so in `sharded`."""


def _check_arguments(gather_dtype: Any, ahead: Any, remat: Any, unroll: Any) -> None:
    count("ahead", " number of layers (0: gathered where they are used)", ahead)
    if count("unroll", " number of layers", unroll) < 1:
        refuse("unroll", "at least 1", unroll)
    if not isinstance(remat, bool) and not callable(remat):
        refuse("remat", "True, False or a policy of `jax.checkpoint_policies`", remat)
    if gather_dtype is not None and not _is_float(gather_dtype):
        what = "None or a floating type, such as `jnp.bfloat16`"
        refuse("gather_dtype", what, gather_dtype)


def _is_float(dtype: Any) -> bool:
    try:
        return jax.dtypes.issubdtype(np.dtype(dtype), np.floating)
    except TypeError:
        return False


def scan_layers(
    layer: Callable[[Any, Any], Any],
    carry: Any,
    stacked: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    gather_dtype: Any = None,
    ahead: int = 1,
    remat: bool | Callable[..., Any] = True,
    sharded: Any = None,
    unroll: int = 1,
    options: CommunicationOptions | None = None,
) -> tuple[Any, Any]:
    """Scan over sharded layers, gathering each layer's parameters ahead of its use (FSDP, ZeRO-3).

    Guarantee: values and gradients are those of `lax.scan` over the whole layers, to rounding, for
    every `ahead`, `remat` and `unroll`. The forward pass gathers a layer while it computes the
    previous one. The backward pass gathers a layer while it differentiates the next one, and
    reduce-scatters gradients one layer later. It gathers and scatters only what is used. Source:
    ZeRO-3, Rajbhandari et al., SC 2020.

    Inside the loss of `jc.value_and_grad`, `jc.grad` or `jc.accumulate` over the same axes,
    gradients of rows are already reduced and are not sent again. Those of whole leaves are reduced
    with all others, and the result is the mean, sum or weighted mean of the enclosing function.
    Outside, under `jax.grad` of this replica's own loss, all gradients of `stacked` are already
    reduced by `reduce_op`.

    Args:
      layer: a function of the carry and one layer's whole parameters. It returns the next carry, or
        a pair of that and a result of the layer. It may capture traced values; they get gradients.
      carry: a tree of arrays, including PRNG keys, with the types that `layer` returns.
      stacked: a tree of arrays with dimensions (layers, this replica's rows, ...), as
        `in_specs=P(None, "data")` splits them; or of `Shards` of stacked layers.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case. It must be MEAN inside
        `jc.value_and_grad`, which turns it into its own sum or weighted mean.
      gather_dtype: dtype to which real floating rows are cast before they are gathered, and in
        which their gradients travel; None: their own. CPUs widen bfloat16 on the wire.
      ahead: number of layers to gather ahead of the one being computed; 0: none.
      remat: what the backward pass keeps of a layer. True: only its carry. False: everything it
        needs, except what is computed from parameters alone. Or a policy of
        `jax.checkpoint_policies`. Only the gathered parameters of the last `ahead` layers are kept.
      sharded: which leaves hold rows: one value for all, or a tree like `stacked` or a prefix of
        it. True; False for leaves that every replica holds whole (biases, norms); or the axes that
        rows are split over, if not all of `axis_name` ("data" of ("node", "data"): shards within a
        host, sums between hosts). None: `Shards` hold rows and arrays beside them are whole;
        without `Shards` all leaves hold rows. Types must agree; where they are not tracked, and
        there are no `Shards`, it must be given.
      unroll: as in `lax.scan`, for both loops.
      options: as in `all_reduce`; the option `shards` has no effect on gathers and scatters.

    Returns:
      The last carry and the stacked results of the layers (None if there are none), as from
      `lax.scan`; *varying*. Gradients of rows are rows, *varying*; outside `jc.value_and_grad`,
      those of whole leaves are *invariant*. Cost: with L layers, 2L - `ahead` gathers of one layer
      and L reduce-scatters, each of (n-1)/n of a layer's bytes.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf has no rows or another number of layers (its path is named), differs
        between replicas but is declared whole, or may be either; or an argument is invalid.
      AlreadyReducedError: a leaf to be gathered is the same on every replica.
      TypeError: the carry that `layer` returns has another type than the one it got.
      NotImplementedError: a gradient is differentiated again.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def replica(rows, x):
      ...     return scan_layers(lambda x, w: w @ x, x, rows, "data", sharded=True)[0]
      >>> rows = jnp.arange(2 * 3 * 1 * 2.0).reshape(2, 3, 1, 2)  # two replicas, three layers
      >>> jax.vmap(replica, axis_name="data")(rows, jnp.ones((2, 2)))[0].tolist()
      [789.0, 1785.0]
    """
    op, scope, inside = ReduceOp.of(reduce_op), scope_here(), differentiation()
    _check_arguments(gather_dtype, ahead, remat, unroll)
    axes = resolve_axes(scope.choose_axes(axis_name, "jc.scan_layers"), CALLER)
    # Inside of a loss, the enclosing `value_and_grad` reduces gradients over the same axes.
    if inside is not None and set(inside.axes).isdisjoint(axes):
        inside = None
    if inside is not None:
        if set(inside.axes) != set(axes):
            raise ValueError(_PARTLY.format(axes=show_axes(axes), outer=show_axes(inside.axes)))
        inside.check_mean(op, axes, CALLER)
        op, scope = ReduceOp.SUM, scope.merge(inside.options)
    scope = scope.merge(check_options(options))
    stack = make_stack(stacked, sharded, axes)
    user_layer = UserLayer(layer, *flatten_carry(carry), stack)
    first, varying, program, captured = user_layer.program(axes, gather_dtype)
    traffic = Traffic(stack, axes, op, gather_dtype, bool(inside), scope)
    schedule = Schedule(stack.layers, ahead, unroll, program, traffic.gathers(ahead), varying)
    run = _differentiable(schedule, traffic, remat)
    return user_layer.result(*run(first, traffic.retype(varying), captured))


def _differentiable(
    schedule: Schedule, traffic: Traffic, remat: Any
) -> Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Make the scan a differentiable function of carry, stack and captured values (lists)."""

    def primal(carry: Arrays, stack: Arrays, captured: Arrays) -> tuple[Arrays, Arrays]:
        outs, results, *_ = schedule.forward(carry, stack, captured)
        return outs, results

    def forward(*inputs: Any) -> Any:
        carry, stack, captured = ([x.value for x in arrays] for arrays in inputs)
        _, *flags = ([x.perturbed and is_floating(x.value) for x in arrays] for arrays in inputs)
        wanted = tuple([i for i, flag in enumerate(group) if flag] for group in flags)
        avals: Any = schedule.program.program.in_avals[len(carry) : len(carry) + len(stack)]
        # The trace reads their shapes alone. Gathered, parameters exist one layer at a time.
        params = [_compat.zeros_like_aval(aval, aval.dtype) for aval in avals]
        residuals = trace_forward(
            schedule.program,
            remat,
            (carry, params, captured),
            [*map(is_floating, carry), *flags[0], *flags[1]],
        )
        outs, results, saved, last = schedule.forward(carry, stack, captured, residuals)
        # A `Partial` is a pytree: it carries what is not an array to the backward pass.
        pull = Partial(functools.partial(backward, residuals, wanted))
        return (outs, results), (pull, saved, last, carry, stack, captured)

    def backward(
        residuals: Residuals,
        wanted: Sequence[Sequence[int]],
        kept: tuple[Any, ...],
        cotangents: tuple[Arrays, Arrays],
    ) -> Any:
        floating = [[x for x in map(_floating, cts) if x is not None] for cts in cotangents]
        (saved, last, carry, stack, captured), floating = _guard_derivative((kept, floating))
        ct, gradients, sums = schedule.backward(
            residuals, saved, last, stack, captured, floating, wanted, traffic.scatters(wanted[0])
        )
        of_carry, of_captured = iter(ct), dict(zip(wanted[1], sums, strict=True))
        return (
            [next(of_carry) if is_floating(x) else None for x in carry],
            traffic.reduce_whole(gradients),
            [of_captured.get(i) for i in range(len(captured))],
        )

    run = jax.custom_vjp(primal)
    run.defvjp(forward, lambda kept, ct: kept[0](kept[1:], ct), symbolic_zeros=True)
    return run


@jax.custom_jvp
def _guard_derivative(tree: Any) -> Any:
    """Pass `tree` on; differentiating it is an error, as a second derivative is not reduced."""
    return tree


@_guard_derivative.defjvp
def _twice(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "`scan_layers` has first derivatives only. For a gradient penalty, a Hessian or "
        "meta-learning use `jax.lax.scan`, and gather each layer in its body."
    )


def _floating(x: Any) -> jax.Array | None:
    """Make a cotangent an array; None for an array without a gradient."""
    if not is_floating(x):
        return None
    symbolic = isinstance(x, jax.custom_derivatives.SymbolicZero)
    return _compat.zeros_like_aval(x.aval, x.dtype) if symbolic else x
