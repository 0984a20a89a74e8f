"""The user's layer, traced once for all turns, as a program of flat lists: forward and backward."""

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
from jaxcoll._jaxpr.retrace import Traced, made_without, part_of, traced, with_captured
from jaxcoll._plan.checks import kind_of
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.layers.exchange import Arrays
from jaxcoll._spmd.layers.stack import CALLER, Stack
from jaxcoll._spmd.scope import as_array, count

_CARRY = """\
`scan_layers` expects `layer` to return a carry like the one it was given; {what}. {fix}"""


@dataclasses.dataclass(frozen=True)
class Residuals:
    """A layer's forward pass with what its backward pass needs, which is of two kinds.

    What depends on the carry is saved. What is made of parameters and captured values alone is
    made again when they are there again: no gathered parameter outlives its layer.
    """

    program: Traced  # from carry, parameters and captured values to results and all residuals
    results: int  # how many arrays come first in it
    again: ClosedJaxpr  # the program of what is made again
    saved: tuple[int, ...]  # the positions, among its arrays, of what is saved

    def backward(
        self, saved: Arrays, params: Arrays, captured: Arrays, cotangents: Arrays
    ) -> list[Any]:
        """The cotangents that were asked for, of carry, parameters and captured values in turn.

        `cotangents` are those of the floating arrays among the results.
        """
        made = iter(jaxpr_as_fun(self.again)(*params, *captured))
        kept = dict(zip(self.saved, saved, strict=True))
        places = range(self.results, len(self.program.program.jaxpr.outvars))
        residuals = [kept[k] if k in kept else next(made) for k in places]
        # What was not kept stands where it stood: JAX's function of a backward pass is a pytree.
        *_, pull = self.program.result([*[None] * self.results, *residuals])
        return list(pull(cotangents))


def residuals_of(
    layer: Traced, remat: Any, arrays: tuple[Arrays, Arrays, Arrays], moved: Sequence[bool]
) -> Residuals:
    """The layer's forward pass with its residuals, for the cotangents of what is `moved`.

    Of a layer is kept, with `remat` True, nothing but its carry; False: all that the backward pass
    reads; otherwise what a policy of `jax.checkpoint` says.
    """

    def forward(*arrays: Arrays) -> tuple[Arrays, Any]:
        inputs = [x for group in arrays for x in group]

        def of_moved(*moving: jax.Array) -> tuple[Arrays, Arrays]:
            there = iter(moving)
            outs = layer.outputs(
                [next(there) if m else x for m, x in zip(moved, inputs, strict=True)]
            )
            return [x for x in outs if is_floating(x)], outs

        run = of_moved
        if remat is not False:
            policy = None if remat is True else remat
            run = jax.checkpoint(of_moved, policy=policy, prevent_cse=False)
        moving = [x for m, x in zip(moved, inputs, strict=True) if m]
        _, pull, outs = jax.vjp(run, *moving, has_aux=True)
        return outs, pull

    program = traced(forward, *arrays)
    results, carried = len(layer.program.jaxpr.outvars), len(arrays[0])
    free = made_without(program.program, range(carried))
    residuals = range(results, len(free))
    again = part_of(
        program.program,
        range(carried, len(program.program.jaxpr.invars)),
        [k for k in residuals if free[k]],
    )
    return Residuals(program, results, again, tuple(k for k in residuals if not free[k]))


def is_floating(x: Any) -> bool:
    """True if an array has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def carried(carry: Any) -> tuple[Arrays, Any]:
    """The carry as strongly typed arrays."""
    flat, treedef = flattened(carry)
    who = "`{}`: {} of `carry`"
    arrays = [as_array(leaf, who.format(CALLER, where(path))) for path, leaf in flat]
    return [*map(_strong, arrays)], treedef


def _strong(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


@dataclasses.dataclass(eq=False)
class UserLayer:
    """The user's layer as a function of lists, and what its results are a tree of."""

    _layer: Callable[[Any, Any], Any]
    _arrays: Arrays  # the first carry
    _carry: Any  # its structure
    _stack: Stack
    _own: Any = None  # the structure of the layer's own results
    _along: tuple[str, ...] = ()  # axes that everything is typed as varying over

    def program(
        self, axes: Mapping[str, int], gather_dtype: Any
    ) -> tuple[Arrays, tuple[str, ...], Traced, Arrays]:
        """The carry, typed as it stays from turn to turn, those axes, and the layer's program.

        From carry, parameters and what the layer's Python captures, which comes last here, to the
        next carry and a result of its own.
        """
        stack = self._stack
        types = [_compat.varying_axes(x) for x in (*self._arrays, *stack.arrays)]
        varying = frozenset(a for a in axes if _compat.tracks_variance(a)).union(*types)
        while True:
            along = self._along = tuple(sorted(varying))
            typed = [_compat.as_varying(x, along) for x in self._arrays]
            params = [
                _compat.as_varying(_one_layer(x, over, axes, gather_dtype), along)
                for x, over in zip(stack.arrays, stack.over, strict=True)
            ]
            program, captured = with_captured(traced(self, typed, params))
            avals = program.program.out_avals
            more = varying.union(*map(_compat.varying_axes_of_type, avals))
            if more == varying:  # else a turn adds axes, and the next one begins with them
                self._check_carry(typed, avals)
                return typed, along, program, captured
            varying = more

    def __call__(self, carry: Arrays, params: Arrays) -> Any:
        try:
            result = self._layer(self._carry.unflatten(carry), self._stack.tree(params))
        except Exception as error:
            error.add_note(self._note(params))
            raise
        nxt, own = self._apart(result)
        flat, self._own = jax.tree.flatten(own)
        outs = [_strong(jnp.asarray(x)) for x in (*jax.tree.leaves(nxt), *flat)]
        return [_compat.as_varying(x, self._along) for x in outs]

    def _apart(self, result: Any) -> tuple[Any, Any]:
        """The next carry, and the layer's own result."""
        if jax.tree.structure(result) == self._carry:
            return result, None
        pair = isinstance(result, tuple) and len(result) == 2
        if pair and jax.tree.structure(result[0]) == self._carry:
            return result
        got = jax.tree.structure(result[0] if pair else result)
        raise TypeError(
            _CARRY.format(
                what=f"its structure is {got}, and was {self._carry}",
                fix="Return that carry, or a pair of it and the layer's own result.",
            )
        )

    def _note(self, params: Arrays) -> str:
        stack = self._stack
        leaves = [
            f"{where(stack.names[i])} {kind_of(params[i])} from {own.shape[1]} rows on each replica"
            for i, own in enumerate(stack.arrays)
            if stack.over[i]
        ]
        more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        return (
            f"jaxcoll: `{CALLER}` gathers for the layer {', '.join(leaves[:3])}{more}; `sharded` "
            "says what is whole."
        )

    def _check_carry(self, carry: Arrays, avals: Any) -> None:
        flat, _ = flattened(self._carry.unflatten(carry))
        for (path, before), after in zip(flat, avals, strict=False):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise TypeError(
                    _CARRY.format(
                        what=f"{where(path)} was {kind_of(before)}, and is {kind_of(after)}",
                        fix="Cast it at the end of the layer, or before the first one; "
                        "`gather_dtype` is the type of the gathered parameters alone.",
                    )
                )

    def result(self, carry: Arrays, results: Arrays) -> tuple[Any, Any]:
        """Return the results in the form of `lax.scan`'s."""
        return self._carry.unflatten(carry), self._own.unflatten(results)


def _one_layer(x: jax.Array, over: Any, axes: Mapping[str, int], dtype: Any) -> jax.Array:
    """An array like one layer's part of a leaf, once it is gathered."""
    if not over:
        return lax.index_in_dim(x, 0, keepdims=False)
    _, rows, *rest = x.shape
    cast = dtype if dtype is not None and jnp.issubdtype(x.dtype, np.floating) else x.dtype
    return jnp.zeros((rows * count({a: axes[a] for a in over}), *rest), cast)
