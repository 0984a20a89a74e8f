"""One layer as a program of flat lists: forward, forward for a later backward, and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxcoll._jaxpr.retrace import Traced, made_without, part_of, traced

Arrays = list[jax.Array]


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
