"""A scan over layers in shards as one differentiable function: checked, traced, put together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import no_array, where
from jaxcoll._plan.plan import Plan
from jaxcoll._show.units import counted, size
from jaxcoll._spmd.axes import bound_axes
from jaxcoll._spmd.layers.exchange import gather, scatter
from jaxcoll._spmd.layers.layer_program import (
    Arrays,
    LayerProgram,
    is_floating,
    layer_program,
    residuals_of,
)
from jaxcoll._spmd.layers.schedule import Schedule, at
from jaxcoll._spmd.layers.stack import CALLER, Stack, stack_of
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Differentiation, Scope, differentiation

_SUM_OF_A_MEAN = """\
`scan_layers` over {axes} with reduce_op SUM, inside the loss of `jc.value_and_grad` or its like: \
what they differentiate is this replica's own loss, and they make a sum or a weighted mean of its \
gradients themselves. Leave reduce_op at "mean" here, whatever theirs is."""

_PARTLY = """\
`scan_layers` over {axes}, inside the loss of `jc.value_and_grad` or its like over {outer}: the \
gradients of one step are reduced over the same axes in both. Give both the same `axis_name`; what \
is cut over some of the axes only is said by `sharded`."""

_CARRY = """\
`scan_layers` expects `layer` to return a carry like the one it was given; {what}. {fix}"""

_CAPTURED = """\
`scan_layers`: `layer` reads an array of type {like} from around it, which is {leaf} of `stacked` \
{how}. All layers' parameters would be held on every device, which they are in rows to avoid: use \
the layer's own, the second argument. What is meant to be whole belongs into `stacked`, with False \
in its place in `sharded`."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the caller of `jc.scan_layers` asked for, checked."""

    reduce_op: ReduceOp
    gather_dtype: Any
    ahead: int
    remat: Any
    unroll: int


def scan_layers(
    layer: Callable[[Any, Any], Any],
    carry: Any,
    stacked: Any,
    axis_name: str | tuple[str, ...],
    *,
    sharded: Any,
    asked: Asked,
    scope: Scope,
    options: CommunicationOptions,
) -> tuple[Any, Any]:
    """`lax.scan` of `layer` over layers of which every replica holds rows; see `jc.scan_layers`."""
    axes = bound_axes(axis_name, CALLER)
    inside = _enclosing(axes, asked.reduce_op)
    scope = scope.merged(inside.options if inside else None).merged(options)
    stack = stack_of(stacked, sharded, axes, scope)
    arrays, treedef = _carried(carry)
    traced = _Layer(layer, treedef, stack)
    arrays, varying, program = _traced(traced, arrays, axes, asked)
    traced.check(arrays, program, axes)
    of_inside = ReduceOp.SUM if inside else asked.reduce_op
    run = _Run(stack, axes, dataclasses.replace(asked, reduce_op=of_inside), bool(inside), scope)
    schedule = Schedule(
        stack.layers, asked.ahead, asked.unroll, program, run.gathers(), varying
    )
    given = run.typed(varying)
    outs, results = run.differentiable(schedule)(arrays, given, list(program.captured))
    return traced.result(program, outs, results)


def _enclosing(axes: Mapping[str, int], reduce_op: ReduceOp) -> Differentiation | None:
    """The differentiation that reduces what this call does not; None: there is none."""
    inside = differentiation()
    if inside is None or not set(inside.axes).intersection(axes):
        return None
    named = ", ".join(map(repr, axes))
    if set(inside.axes) != set(axes):
        raise ValueError(_PARTLY.format(axes=named, outer=", ".join(map(repr, inside.axes))))
    if reduce_op is not ReduceOp.MEAN:
        raise ValueError(_SUM_OF_A_MEAN.format(axes=named))
    return inside


def _carried(carry: Any) -> tuple[Arrays, Any]:
    """The carry as strongly typed arrays."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(carry)
    arrays = []
    for path, leaf in flat:
        got = no_array(leaf)
        if got is not None:
            name = where(jax.tree_util.keystr(path))
            raise ValueError(f"`{CALLER}`: {name} of `carry`: expected an array, got {got}.")
        arrays.append(_strong(jnp.asarray(leaf)))
    return arrays, treedef


def _strong(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _traced(
    layer: _Layer, carry: Arrays, axes: Mapping[str, int], asked: Asked
) -> tuple[Arrays, tuple[str, ...], LayerProgram]:
    """The carry, typed as it stays from turn to turn, those axes, and the layer's program."""
    stack = layer.stack
    known = [_compat.varying_axes(x) for x in (*carry, *stack.arrays)]
    varying = frozenset(a for a in axes if _compat.tracks_variance(a)).union(*known)
    while True:
        along = tuple(sorted(varying))
        typed = [_compat.as_varying(x, along) for x in carry]
        params = [
            _compat.as_varying(_one_layer(x, over, axes, asked.gather_dtype), along)
            for x, over in zip(stack.arrays, stack.over, strict=True)
        ]
        program = layer_program(layer, typed, params, asked.remat)
        more = varying.union(*map(_compat.varying_axes_of_type, program.program.program.out_avals))
        if more == varying:
            return typed, along, program
        varying = more


def _one_layer(x: jax.Array, over: Any, axes: Mapping[str, int], dtype: Any) -> jax.Array:
    """An array like one layer's part of a leaf, once it is gathered."""
    if not over:
        return at(x, 0)
    _, rows, *rest = x.shape
    cast = dtype if dtype is not None and jnp.issubdtype(x.dtype, np.floating) else x.dtype
    return jnp.zeros((rows * int(np.prod([axes[a] for a in over])), *rest), cast)


class _Layer:
    """The user's layer as a function of lists, and what its results are a tree of.

    Args:
      layer: the user's.
      treedef: of the carry.
      stack: of the parameters.
    """

    def __init__(self, layer: Callable[[Any, Any], Any], treedef: Any, stack: Stack) -> None:
        self._layer = layer
        self._carry = treedef
        self.stack = stack
        self._own: Any = None

    def __call__(self, carry: Arrays, params: Arrays) -> Any:
        try:
            found = self._layer(self._carry.unflatten(carry), self.stack.tree(params))
        except Exception as error:
            error.add_note(self._note(params))
            raise
        nxt, own = self._apart(found)
        flat, self._own = jax.tree.flatten(own)
        return [_strong(jnp.asarray(x)) for x in (*jax.tree.leaves(nxt), *flat)]

    def _apart(self, found: Any) -> tuple[Any, Any]:
        """The next carry, and the layer's own result."""
        if jax.tree.structure(found) == self._carry:
            return found, None
        pair = isinstance(found, tuple) and len(found) == 2
        if pair and jax.tree.structure(found[0]) == self._carry:
            return found
        got = jax.tree.structure(found[0] if pair else found)
        raise TypeError(
            _CARRY.format(
                what=f"its structure is {got}, and was {self._carry}",
                fix="Return that carry, or a pair of it and the layer's own result.",
            )
        )

    def _note(self, params: Arrays) -> str:
        stack = self.stack
        found = [
            f"{where(name)} {_like(whole)} from {own.shape[1]} rows on each replica"
            for name, own, whole, over in zip(
                stack.names, stack.arrays, params, stack.over, strict=True
            )
            if over
        ]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"jaxcoll: `{CALLER}` called the layer with gathered {', '.join(found[:3])}{more}."

    def check(self, carry: Arrays, program: LayerProgram, axes: Mapping[str, int]) -> None:
        """Refuse a carry that changes its type, and a layer that reads the stack itself."""
        avals = program.program.program.out_avals
        for before, after, path in zip(carry, avals, self._paths(), strict=False):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise TypeError(
                    _CARRY.format(
                        what=f"{where(path)} was {_like(before)}, and is {_like(after)}",
                        fix="Cast it at the end of the layer, or before the first one; "
                        "`gather_dtype` is the type of the gathered parameters alone.",
                    )
                )
        for value in program.captured:
            self._check_captured(value, axes)

    def _check_captured(self, value: Any, axes: Mapping[str, int]) -> None:
        stack = self.stack
        for name, own, over in zip(stack.names, stack.arrays, stack.over, strict=True):
            if not over or own.size < 2:
                continue
            layers, rows, *rest = own.shape
            whole = (layers, rows * int(np.prod([axes[a] for a in over])), *rest)
            if value.shape == whole and value.dtype == own.dtype:
                raise ValueError(
                    _CAPTURED.format(like=_like(value), leaf=where(name), how="gathered")
                )

    def _paths(self) -> list[str]:
        tree = self._carry.unflatten(range(self._carry.num_leaves))
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        return [jax.tree_util.keystr(path) for path, _ in flat]

    def result(self, program: LayerProgram, carry: Arrays, results: Arrays) -> tuple[Any, Any]:
        """What `lax.scan` returns."""
        return self._carry.unflatten(carry), self._own.unflatten(results)


@dataclasses.dataclass(frozen=True)
class _Run:
    """How a stack is gathered, differentiated and reduced.

    Attributes:
      stack: parameters.
      axes: outer first.
      asked: with the reduction of what is scattered here.
      inside: whether something around reduces what is whole, and divides.
      scope: options and world.
    """

    stack: Stack
    axes: Mapping[str, int]
    asked: Asked
    inside: bool
    scope: Scope

    def _groups(self, which: Any = None) -> dict[tuple[int, ...], dict[str, int]]:
        """Leaves that travel together, by number, with the axes that they are cut over."""
        found: dict[Any, list[int]] = {}
        for i, over in enumerate(self.stack.over):
            if over and (which is None or i in which):
                found.setdefault(over, []).append(i)
        return {tuple(leaves): {a: self.axes[a] for a in over} for over, leaves in found.items()}

    def gathers(self) -> dict[tuple[int, ...], Any]:
        """By the leaves that travel together what gathers one layer's rows of them."""
        found = {}
        for leaves, axes in self._groups().items():
            layers, ahead = self.stack.layers, min(self.asked.ahead, self.stack.layers)
            found[leaves] = gather(
                self._rows(leaves), axes, self.asked.gather_dtype, "", self.scope
            )
            forward, backward = counted(layers, "gather"), 2 * layers - ahead
            when = (
                f"{counted(ahead, 'layer')} ahead of its use" if ahead else "where it is used"
            )
            sent = f"{size(found[leaves].plan.wire_bytes * backward)}"
            times = (
                f"layers: {layers}, each gathered {when}: {forward} in the forward pass, "
                f"{backward} with the backward pass, which send {sent} from each device"
            )
            plan = _with_reason(found[leaves].plan, times)
            found[leaves] = dataclasses.replace(found[leaves], plan=plan)
            self.scope.record(plan)
        return found

    def _rows(self, leaves: tuple[int, ...]) -> dict[str, Any]:
        """The types of one layer's rows."""
        stack = self.stack
        return {stack.names[i]: jax.eval_shape(lambda x: x[0], stack.arrays[i]) for i in leaves}

    def _scatters(self, moved: list[int]) -> dict[tuple[int, ...], Any]:
        found = {}
        for leaves, axes in self._groups(set(moved)).items():
            each = scatter(
                self._rows(leaves), axes, self.asked.reduce_op, self.asked.gather_dtype, "",
                self.scope,
            )  # fmt: skip
            layers = self.stack.layers
            sent = size(each.plan.wire_bytes * layers)
            times = (
                f"layers: {layers}, the gradient of each reduce-scattered while that of the layer "
                f"before it is computed: {counted(layers, 'reduce-scatter')}, which send {sent} "
                "from each device"
            )
            each = dataclasses.replace(each, plan=_with_reason(each.plan, times))
            self.scope.record(each.plan)
            rest = tuple(a for a in self.axes if a not in axes)
            found[leaves] = functools.partial(self._reduced, each, rest)
        return found

    def _reduced(self, each: Any, rest: tuple[str, ...], gradients: Arrays) -> Arrays:
        rows = each(gradients)
        if self.inside or not rest:
            return rows
        return all_reduce(self.asked.reduce_op, rows, rest, scope=self.scope)

    def typed(self, varying: tuple[str, ...]) -> Arrays:
        """The stack, typed as its cotangents are going to be."""
        return [
            _compat.as_varying(x, tuple(a for a in varying if a not in self._settled(over)))
            for x, over in zip(self.stack.arrays, self.stack.over, strict=True)
        ]

    def _settled(self, over: tuple[str, ...]) -> tuple[str, ...]:
        """The axes along which a cotangent is the same when it is handed on."""
        return () if self.inside else tuple(a for a in self.axes if a not in over)

    def differentiable(self, schedule: Schedule) -> Callable[[Arrays, Arrays, Arrays], Any]:
        """The scan of lists: of the carry, the stack, and what the layer captured."""

        def primal(carry: Arrays, stack: Arrays, captured: Arrays) -> tuple[Arrays, Arrays]:
            outs, results, *_ = schedule.forward(carry, stack, captured)
            return outs, results

        def forward(*given: Any) -> Any:
            asked = [[x.perturbed and is_floating(x.value) for x in each] for each in given]
            carry, stack, captured = ([x.value for x in each] for each in given)
            moved = tuple([i for i, m in enumerate(each) if m] for each in asked[1:])
            floats = [is_floating(x) for x in carry]
            params = schedule.example(stack)
            residuals = residuals_of(
                schedule.layer, (carry, params, captured), [*floats, *asked[1], *asked[2]]
            )
            found.append((residuals, moved))
            outs, results, saved, last = schedule.forward(carry, stack, captured, residuals)
            return (outs, results), (saved, last, carry, stack, captured)

        def backward(kept: Any, cotangents: Any) -> Any:
            residuals, moved = found[-1]
            saved, last, carry, stack, captured = kept
            given = tuple([x for x in map(_floating, each) if x is not None] for each in cotangents)
            ct, gradients, sums = schedule.backward(
                residuals, saved, last, stack, captured, given, moved, self._scatters(moved[0])
            )
            there = iter(ct)
            of_carry = [next(there) if is_floating(x) else None for x in carry]
            settled = self._whole(gradients)
            return (
                of_carry,
                [settled.get(i) for i in range(len(stack))],
                [dict(zip(moved[1], sums, strict=True)).get(i) for i in range(len(captured))],
            )

        found: list[Any] = []
        run = jax.custom_vjp(primal)
        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _whole(self, gradients: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """The gradients as they are handed on: those of whole leaves reduced, unless that is done."""
        if self.inside:
            return gradients
        over = self.stack.over
        whole = {self.stack.names[i]: x for i, x in gradients.items() if not over[i]}
        if whole:
            reasons = ("when: after the backward pass of all layers, of leaves that are whole",)
            sums = all_reduce(
                self.asked.reduce_op, whole, tuple(self.axes), scope=self.scope, reasons=reasons
            )
        return {
            i: sums[self.stack.names[i]]
            if not over[i]
            else _compat.as_invariant(x, self._settled(over[i]))
            for i, x in gradients.items()
        }


def _floating(x: Any) -> jax.Array | None:
    """A cotangent as an array; None of what has no gradient."""
    if isinstance(x, jax.custom_derivatives.SymbolicZero):
        return _compat.zeros_like_aval(x.aval, x.dtype) if is_floating(x) else None
    return x if is_floating(x) else None


def _with_reason(plan: Plan, reason: str) -> Plan:
    return dataclasses.replace(plan, reasons=(reason, *plan.reasons[1:]))


def _like(x: Any) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
