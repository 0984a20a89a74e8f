"""The user's layer, traced once for all steps of the scan: its forward and backward programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxcoll import _compat
from jaxcoll._collectives.scope import count, require_array
from jaxcoll._gradients.layers.exchange import Arrays
from jaxcoll._gradients.layers.stack import CALLER, Stack
from jaxcoll._gradients.proof.retrace import (
    Traced,
    cut_program,
    find_independent,
    lift_captured,
    trace,
)
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.packs.leaves import flatten_with_paths, where

_CARRY = """\
`scan_layers` expects `layer` to return a carry like the one it was given; {what}. {fix}"""


@dataclasses.dataclass(frozen=True)
class Residuals:
    """A layer's forward pass with its residuals: the values that the backward pass needs.

    Residuals that depend on the carry are saved. The others are recomputed from parameters and
    captured values in the backward pass, so that no gathered parameter outlives its layer.
    """

    program: Traced  # from carry, parameters and captured values to results and all residuals
    results: int  # the number of results, which come first
    recompute: ClosedJaxpr  # from parameters and captured values to the residuals not saved
    saved: tuple[int, ...]  # positions of the saved residuals among the outputs of `program`

    def backward(
        self, saved: Arrays, params: Arrays, captured: Arrays, cotangents: Arrays
    ) -> list[Any]:
        """Compute the wanted cotangents: of carry, parameters and captured values, in order.

        `cotangents` are those of the floating results.
        """
        recomputed = iter(jaxpr_as_fun(self.recompute)(*params, *captured))
        kept = dict(zip(self.saved, saved, strict=True))
        positions = range(self.results, len(self.program.program.jaxpr.outvars))
        residuals = [kept[k] if k in kept else next(recomputed) for k in positions]
        # JAX's backward function is a pytree, which these residuals restore.
        *_, pull = self.program.result([*[None] * self.results, *residuals])
        return list(pull(cotangents))


def trace_forward(
    layer: Traced, remat: Any, arrays: tuple[Arrays, Arrays, Arrays], wanted: Sequence[bool]
) -> Residuals:
    """Trace the layer with residuals for the cotangents of the `wanted` inputs.

    With `remat` True only the carry is saved; with False everything that the backward pass reads;
    otherwise what a policy of `jax.checkpoint` says.
    """

    def forward(*arrays: Arrays) -> tuple[Arrays, Any]:
        inputs = [x for group in arrays for x in group]

        def compute(*differentiated: jax.Array) -> tuple[Arrays, Arrays]:
            remaining = iter(differentiated)
            outs = layer.outputs(
                [next(remaining) if m else x for m, x in zip(wanted, inputs, strict=True)]
            )
            return [x for x in outs if is_floating(x)], outs

        run = compute
        if remat is not False:
            policy = None if remat is True else remat
            run = jax.checkpoint(compute, policy=policy, prevent_cse=False)
        differentiated = [x for m, x in zip(wanted, inputs, strict=True) if m]
        _, pull, outs = jax.vjp(run, *differentiated, has_aux=True)
        return layer.make_arrays(outs), pull

    program = trace(forward, *arrays)
    results, carried = len(layer.program.jaxpr.outvars), len(arrays[0])
    no_carry = find_independent(program.program, range(carried))
    residuals = range(results, len(no_carry))
    # Casts and transposes of parameters depend on no carry: saved, they would keep one copy of
    # every layer's gathered parameters until the backward pass.
    recompute = cut_program(
        program.program,
        range(carried, len(program.program.jaxpr.invars)),
        [k for k in residuals if no_carry[k]],
    )
    return Residuals(program, results, recompute, tuple(k for k in residuals if not no_carry[k]))


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def flatten_carry(carry: Any) -> tuple[Arrays, Any]:
    flat, treedef = flatten_with_paths(carry)
    who = "`{}`: {} of `carry`"
    arrays = [require_array(leaf, who.format(CALLER, where(path))) for path, leaf in flat]
    return [*map(_strong, arrays)], treedef


def _strong(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


@dataclasses.dataclass(eq=False)
class UserLayer:
    """The user's layer as a function of lists of arrays, and the structure of its results."""

    _layer: Callable[[Any, Any], Any]
    _arrays: Arrays  # the first carry
    _carry: Any  # its structure
    _stack: Stack
    _result: Any = None  # the structure of the layer's result besides the carry
    _along: tuple[str, ...] = ()  # axes that everything is typed as varying over

    def program(
        self, axes: Mapping[str, int], gather_dtype: Any
    ) -> tuple[Arrays, tuple[str, ...], Traced, Arrays]:
        """Trace the layer with a carry that keeps its type from step to step.

        Returns:
          The typed carry; the axes it varies over; the program from carry, parameters and captured
          values to the next carry and the layer's result; and the captured values.
        """
        stack = self._stack
        types = [_compat.varying_axes(x) for x in (*self._arrays, *stack.arrays)]
        varying = frozenset(a for a in axes if _compat.tracks_variance(a)).union(*types)
        while True:
            along = self._along = tuple(sorted(varying))
            typed = [_compat.cast_varying(x, along) for x in self._arrays]
            params = [
                _compat.cast_varying(_one_layer(x, over, axes, gather_dtype), along)
                for x, over in zip(stack.arrays, stack.over, strict=True)
            ]
            program, captured = lift_captured(trace(self, typed, params))
            avals = program.program.out_avals
            more = varying.union(*map(_compat.varying_axes_of_type, avals))
            if more == varying:  # else a step adds axes, and the next one starts with them
                self._check_carry(typed, avals)
                return typed, along, program, captured
            varying = more

    def __call__(self, carry: Arrays, params: Arrays) -> Any:
        try:
            result = self._layer(self._carry.unflatten(carry), self._stack.tree(params))
        except Exception as error:
            error.add_note(self._note(params))
            raise
        carried_on, layer_result = self._split(result)
        flat, self._result = jax.tree.flatten(layer_result)
        outs = [_strong(jnp.asarray(x)) for x in (*jax.tree.leaves(carried_on), *flat)]
        return [_compat.cast_varying(x, self._along) for x in outs]

    def _split(self, result: Any) -> tuple[Any, Any]:
        """Split a result into the next carry and the layer's own result, or None."""
        if jax.tree.structure(result) == self._carry:
            return result, None
        pair = isinstance(result, tuple) and len(result) == 2
        if pair and jax.tree.structure(result[0]) == self._carry:
            return result
        got = jax.tree.structure(result[0] if pair else result)
        what = f"its structure is {got}, and was {self._carry}"
        fix = "Return that carry, or a pair of it and another result."
        raise TypeError(_CARRY.format(what=what, fix=fix))

    def _note(self, params: Arrays) -> str:
        stack = self._stack
        leaves = [
            f"{where(stack.names[i])} {describe_type(params[i])} from {x.shape[1]} rows on each "
            "replica"
            for i, x in enumerate(stack.arrays)
            if stack.over[i]
        ]
        more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        return (
            f"jaxcoll: `{CALLER}` gathers for the layer {', '.join(leaves[:3])}{more}; `sharded` "
            "says which leaves are whole."
        )

    def _check_carry(self, carry: Arrays, avals: Any) -> None:
        flat, _ = flatten_with_paths(self._carry.unflatten(carry))
        for (path, before), after in zip(flat, avals, strict=False):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                what = f"{where(path)} was {describe_type(before)}, and is {describe_type(after)}"
                fix = "Cast it at the end of the layer, or before the first one."
                raise TypeError(_CARRY.format(what=what, fix=fix))

    def result(self, carry: Arrays, results: Arrays) -> tuple[Any, Any]:
        return self._carry.unflatten(carry), self._result.unflatten(results)


def _one_layer(x: jax.Array, over: Any, axes: Mapping[str, int], dtype: Any) -> jax.Array:
    """Make an array like one layer's part of a leaf, once gathered, for tracing."""
    if not over:
        return lax.index_in_dim(x, 0, keepdims=False)
    _, rows, *rest = x.shape
    cast = dtype if dtype is not None and jnp.issubdtype(x.dtype, np.floating) else x.dtype
    return jnp.zeros((rows * count({a: axes[a] for a in over}), *rest), cast)
