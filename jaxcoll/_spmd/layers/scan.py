"""A scan over layers in shards as one differentiable function: checked, traced, put together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from jaxcoll import _compat
from jaxcoll._plan.checks import count, shown
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._spmd.axes import bound_axes, listed
from jaxcoll._spmd.layers.exchange import Traffic
from jaxcoll._spmd.layers.layer_program import (
    Arrays,
    Residuals,
    UserLayer,
    carried,
    is_floating,
    residuals_of,
)
from jaxcoll._spmd.layers.schedule import Schedule
from jaxcoll._spmd.layers.stack import CALLER, stack_of
from jaxcoll._spmd.scope import Differentiation, Scope, differentiation

_PARTLY = """\
`scan_layers` over {axes}, inside the loss of `jc.value_and_grad` or its like over {outer}: the \
gradients of one step are reduced over the same axes in both. Give both the same `axis_name`; what \
is cut over some of the axes only is said by `sharded`."""


@dataclasses.dataclass(frozen=True)
class ScanOptions:
    """Arguments of `jc.scan_layers`, checked; see there."""

    reduce_op: ReduceOp
    gather_dtype: Any = None
    ahead: int = 1
    remat: Any = True
    unroll: int = 1

    def __post_init__(self) -> None:
        count("ahead", " number of layers (0: gathered where they are used)", self.ahead)
        if count("unroll", " number of turns", self.unroll) < 1:
            raise ValueError(f"`unroll` must be at least 1; got {self.unroll!r}.")
        if not isinstance(self.remat, bool) and not callable(self.remat):
            raise ValueError(
                "`remat` must be True, False or a policy of `jax.checkpoint_policies`; got "
                f"{shown(self.remat)}."
            )
        if self.gather_dtype is not None and not _is_float(self.gather_dtype):
            raise ValueError(
                "`gather_dtype` must be None or a floating type, as `jnp.bfloat16`; got "
                f"{shown(self.gather_dtype)}."
            )


def _is_float(dtype: Any) -> bool:
    try:
        return jax.dtypes.issubdtype(np.dtype(dtype), np.floating)
    except TypeError:
        return False


def scan_layers(
    layer: Callable[[Any, Any], Any],
    carry: Any,
    stacked: Any,
    axis_name: str | tuple[str, ...],
    sharded: Any,
    scan: ScanOptions,
    scope: Scope,
    options: CommunicationOptions,
) -> tuple[Any, Any]:
    """`lax.scan` of `layer` over layers of which every replica holds rows; see `jc.scan_layers`."""
    axes = bound_axes(axis_name, CALLER)
    inside = _enclosing(axes, scan.reduce_op)
    scope = scope.merged(inside.options if inside else None).merged(options)
    stack = stack_of(stacked, sharded, axes)
    users = UserLayer(layer, *carried(carry), stack)
    first, varying, program, captured = users.program(axes, scan.gather_dtype)
    op = ReduceOp.SUM if inside else scan.reduce_op
    traffic = Traffic(stack, axes, op, scan.gather_dtype, bool(inside), scope)
    gathers = traffic.gathers(scan.ahead)
    schedule = Schedule(stack.layers, scan.ahead, scan.unroll, program, gathers, varying)
    run = _differentiable(schedule, traffic, scan.remat)
    return users.result(*run(first, traffic.typed(varying), captured))


def _enclosing(axes: Mapping[str, int], reduce_op: ReduceOp) -> Differentiation | None:
    """The differentiation that reduces what this call does not; None: there is none."""
    inside = differentiation()
    if inside is None or not set(inside.axes).intersection(axes):
        return None
    if set(inside.axes) != set(axes):
        raise ValueError(_PARTLY.format(axes=listed(axes), outer=listed(inside.axes)))
    inside.check_mean(reduce_op, axes, CALLER)
    return inside


def _differentiable(
    schedule: Schedule, traffic: Traffic, remat: Any
) -> Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]:
    """The scan as a function of the carry, the stack, and what the layer captured, all lists."""

    def primal(carry: Arrays, stack: Arrays, captured: Arrays) -> tuple[Arrays, Arrays]:
        outs, results, *_ = schedule.forward(carry, stack, captured)
        return outs, results

    def forward(*inputs: Any) -> Any:
        carry, stack, captured = ([x.value for x in arrays] for arrays in inputs)
        _, *moves = ([x.perturbed and is_floating(x.value) for x in arrays] for arrays in inputs)
        moved = tuple([i for i, does in enumerate(flags) if does] for flags in moves)
        residuals = residuals_of(
            schedule.program,
            remat,
            (carry, schedule.example(stack), captured),
            [*map(is_floating, carry), *moves[0], *moves[1]],
        )
        outs, results, saved, last = schedule.forward(carry, stack, captured, residuals)
        # What is not an array travels as the function of a tree.
        pull = Partial(functools.partial(backward, residuals, moved))
        return (outs, results), (pull, saved, last, carry, stack, captured)

    def backward(
        residuals: Residuals,
        moved: Sequence[Sequence[int]],
        kept: tuple[Any, ...],
        cotangents: tuple[Arrays, Arrays],
    ) -> Any:
        floating = [[x for x in map(_floating, cts) if x is not None] for cts in cotangents]
        (saved, last, carry, stack, captured), floating = _differentiated_once((kept, floating))
        ct, gradients, sums = schedule.backward(
            residuals, saved, last, stack, captured, floating, moved, traffic.scatters(moved[0])
        )
        of_carry, of_captured = iter(ct), dict(zip(moved[1], sums, strict=True))
        return (
            [next(of_carry) if is_floating(x) else None for x in carry],
            traffic.handed_on(gradients),
            [of_captured.get(i) for i in range(len(captured))],
        )

    run = jax.custom_vjp(primal)
    run.defvjp(forward, lambda kept, ct: kept[0](kept[1:], ct), symbolic_zeros=True)
    return run


@jax.custom_jvp
def _differentiated_once(tree: Any) -> Any:
    """`tree`, which has no derivative: a second one would not reduce as the first does."""
    return tree


@_differentiated_once.defjvp
def _twice(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "`scan_layers` has first derivatives only: a gradient penalty, a Hessian or meta-learning "
        "needs `jax.lax.scan` over layers that are gathered in its body."
    )


def _floating(x: Any) -> jax.Array | None:
    """A cotangent as an array; None of what has no gradient."""
    if not is_floating(x):
        return None
    symbolic = isinstance(x, jax.custom_derivatives.SymbolicZero)
    return _compat.zeros_like_aval(x.aval, x.dtype) if symbolic else x
