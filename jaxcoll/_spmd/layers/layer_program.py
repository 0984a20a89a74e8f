"""The user's layer, traced once for all turns, as a program of flat lists: forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxcoll import _compat
from jaxcoll._jaxpr.retrace import Traced, made_without, part_of, traced
from jaxcoll._plan.packs.leaves import flattened, no_array, where
from jaxcoll._spmd.axes import count
from jaxcoll._spmd.layers.stack import CALLER, Stack

Arrays = list[jax.Array]

_CARRY = """\
`scan_layers` expects `layer` to return a carry like the one it was given; {what}. {fix}"""

_CAPTURED = """\
`scan_layers`: `layer` reads an array of type {like} from around it, which is what {leaf} of \
`stacked` would be, gathered: every device would hold all layers' parameters. Use the layer's own, \
the second argument. What is meant to be whole belongs into `stacked`, with False in its place in \
`sharded`."""


@dataclasses.dataclass(frozen=True)
class LayerProgram:
    """What a layer does to its carry, with nothing left that it captures."""

    # From carry, parameters and what is captured to the next carry and a result of its own
    program: Traced
    carried: int  # how many arrays are carried
    # What of a layer is kept for the backward pass: True nothing but its carry, False all that the
    # backward pass reads, otherwise what a policy of `jax.checkpoint` says
    policy: Any

    @property
    def captured(self) -> list[Any]:
        """The traced values that the layer's Python reads from around it."""
        return [c for c in self.program.program.consts if isinstance(c, Tracer)]

    def forward(self, carry: Arrays, params: Arrays, captured: Arrays) -> tuple[Arrays, Arrays]:
        """The layer's carry and results; and what is to be saved, nothing."""
        given, closed = iter(captured), self.program.program
        consts = [next(given) if isinstance(c, Tracer) else c for c in closed.consts]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*carry, *params), []


@dataclasses.dataclass(frozen=True)
class Residuals:
    """A layer's forward pass with what its backward pass needs, which is of two kinds.

    What depends on the carry is saved. What is made of parameters and captured values alone is
    made again when they are there again: no gathered parameter outlives its layer.
    """

    program: Traced  # from carry, parameters and captured values to results and all residuals
    results: int  # how many arrays come first in it
    again: ClosedJaxpr  # the program of what is made again
    saved: tuple[int, ...]  # the positions, among all residuals, of what is saved

    @property
    def saved_avals(self) -> list[Any]:
        """The types of what is saved."""
        return [self.program.program.out_avals[self.results + k] for k in self.saved]

    def forward(self, carry: Arrays, params: Arrays, captured: Arrays) -> tuple[Arrays, Arrays]:
        """The layer's carry and results, and what is to be saved."""
        outs = self.program.outputs(carry, params, captured)
        residuals = outs[self.results :]
        return outs[: self.results], [residuals[k] for k in self.saved]

    def backward(
        self, saved: Arrays, params: Arrays, captured: Arrays, cotangents: Arrays
    ) -> list[Any]:
        """The cotangents that were asked for, of carry, parameters and captured values in turn.

        `cotangents` are those of the floating arrays among the results.
        """
        made = iter(jaxpr_as_fun(self.again)(*params, *captured))
        kept = dict(zip(self.saved, saved, strict=True))
        count = len(self.program.program.jaxpr.outvars) - self.results
        residuals = [kept[k] if k in kept else next(made) for k in range(count)]
        # What was not kept stands where it stood: JAX's function of a backward pass is a pytree.
        *_, pull = self.program.result([*[None] * self.results, *residuals])
        return list(pull(cotangents))


def residuals_of(
    layer: LayerProgram, arrays: tuple[Arrays, Arrays, Arrays], moved: Sequence[bool]
) -> Residuals:
    """The layer's forward pass with its residuals, for the cotangents of what is `moved`."""
    sizes = [len(each) for each in arrays]

    def forward(*arrays: Arrays) -> tuple[Arrays, Any]:
        inputs = [x for each in arrays for x in each]

        def of_moved(*given: jax.Array) -> tuple[Arrays, Arrays]:
            there = iter(given)
            every = [next(there) if m else x for m, x in zip(moved, inputs, strict=True)]
            outs, _ = layer.forward(*_cut(every, sizes))
            return [x for x in outs if is_floating(x)], outs

        run = of_moved
        if layer.policy is not False:
            policy = None if layer.policy is True else layer.policy
            run = jax.checkpoint(of_moved, policy=policy, prevent_cse=False)
        given = [x for m, x in zip(moved, inputs, strict=True) if m]
        _, pull, outs = jax.vjp(run, *given, has_aux=True)
        return outs, pull

    program = traced(forward, inputs=arrays)
    results = len(layer.program.program.jaxpr.outvars)
    free = made_without(program.program, range(sizes[0]))[results:]
    saved = tuple(k for k, without in enumerate(free) if not without)
    again = part_of(
        program.program,
        range(sizes[0], sum(sizes)),
        [results + k for k, without in enumerate(free) if without],
    )
    return Residuals(program, results, again, saved)


def is_floating(x: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _cut(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    rest = iter(items)
    return [list(itertools.islice(rest, size)) for size in sizes]


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
        return lax.index_in_dim(x, 0, keepdims=False)
    _, rows, *rest = x.shape
    cast = dtype if dtype is not None and jnp.issubdtype(x.dtype, np.floating) else x.dtype
    return jnp.zeros((rows * count({a: axes[a] for a in over}), *rest), cast)


def _like(x: Any) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
