"""The user's layer, traced once for all turns: what it is given, and what it may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._jaxpr.retrace import traced
from jaxcoll._plan.packs.leaves import flattened, no_array, where
from jaxcoll._spmd.axes import count
from jaxcoll._spmd.layers.layer_program import Arrays, LayerProgram
from jaxcoll._spmd.layers.schedule import at
from jaxcoll._spmd.layers.stack import CALLER, Stack

_CARRY = """\
`scan_layers` expects `layer` to return a carry like the one it was given; {what}. {fix}"""

_CAPTURED = """\
`scan_layers`: `layer` reads an array of type {like} from around it, which is what {leaf} of \
`stacked` would be, gathered: every device would hold all layers' parameters. Use the layer's own, \
the second argument. What is meant to be whole belongs into `stacked`, with False in its place in \
`sharded`."""


def carried(carry: Any) -> tuple[Arrays, Any]:
    """The carry as strongly typed arrays."""
    flat, treedef = flattened(carry)
    arrays = []
    for path, leaf in flat:
        got = no_array(leaf)
        if got is not None:
            raise ValueError(f"`{CALLER}`: {where(path)} of `carry`: expected an array, got {got}.")
        arrays.append(_strong(jnp.asarray(leaf)))
    return arrays, treedef


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
        self, axes: Mapping[str, int], gather_dtype: Any, remat: Any
    ) -> tuple[Arrays, tuple[str, ...], LayerProgram]:
        """The carry, typed as it stays from turn to turn, those axes, and the layer's program."""
        stack = self._stack
        known = [_compat.varying_axes(x) for x in (*self._arrays, *stack.arrays)]
        varying = frozenset(a for a in axes if _compat.tracks_variance(a)).union(*known)
        while True:
            along = self._along = tuple(sorted(varying))
            typed = [_compat.as_varying(x, along) for x in self._arrays]
            params = [
                _compat.as_varying(_one_layer(x, over, axes, gather_dtype), along)
                for x, over in zip(stack.arrays, stack.over, strict=True)
            ]
            program = LayerProgram(traced(self, inputs=(typed, params)), len(typed), remat)
            avals = program.program.program.out_avals
            more = varying.union(*map(_compat.varying_axes_of_type, avals))
            if more == varying:  # else a turn adds axes, and the next one begins with them
                self._check_carry(typed, avals)
                for value in program.captured:
                    self._check_captured(value, axes)
                return typed, along, program
            varying = more

    def __call__(self, carry: Arrays, params: Arrays) -> Any:
        try:
            found = self._layer(self._carry.unflatten(carry), self._stack.tree(params))
        except Exception as error:
            error.add_note(self._note(params))
            raise
        nxt, own = self._apart(found)
        flat, self._own = jax.tree.flatten(own)
        outs = [_strong(jnp.asarray(x)) for x in (*jax.tree.leaves(nxt), *flat)]
        return [_compat.as_varying(x, self._along) for x in outs]

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
        stack = self._stack
        found = [
            f"{where(stack.names[i])} {_like(params[i])} from {own.shape[1]} rows on each replica"
            for i, own in enumerate(stack.arrays)
            if stack.over[i]
        ]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return (
            f"jaxcoll: `{CALLER}` gathers for the layer {', '.join(found[:3])}{more}; `sharded` "
            "says what is whole."
        )

    def _check_carry(self, carry: Arrays, avals: Any) -> None:
        flat, _ = flattened(self._carry.unflatten(carry))
        for (path, before), after in zip(flat, avals, strict=False):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise TypeError(
                    _CARRY.format(
                        what=f"{where(path)} was {_like(before)}, and is {_like(after)}",
                        fix="Cast it at the end of the layer, or before the first one; "
                        "`gather_dtype` is the type of the gathered parameters alone.",
                    )
                )

    def _check_captured(self, value: Any, axes: Mapping[str, int]) -> None:
        stack = self._stack
        for name, own, over in zip(stack.names, stack.arrays, stack.over, strict=True):
            if not over or own.size < 2:
                continue
            layers, rows, *rest = own.shape
            whole = (layers, rows * count({a: axes[a] for a in over}), *rest)
            if value.shape == whole and value.dtype == own.dtype:
                raise ValueError(_CAPTURED.format(like=_like(value), leaf=where(name)))

    def result(self, carry: Arrays, results: Arrays) -> tuple[Any, Any]:
        """What `lax.scan` returns."""
        return self._carry.unflatten(carry), self._own.unflatten(results)


def _one_layer(x: jax.Array, over: Any, axes: Mapping[str, int], dtype: Any) -> jax.Array:
    """An array like one layer's part of a leaf, once it is gathered."""
    if not over:
        return at(x, 0)
    _, rows, *rest = x.shape
    cast = dtype if dtype is not None and jnp.issubdtype(x.dtype, np.floating) else x.dtype
    return jnp.zeros((rows * count({a: axes[a] for a in over}), *rest), cast)


def _like(x: Any) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
