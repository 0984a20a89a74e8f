"""The order in which the results of a traced program become ready, read from its equations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxcoll._jaxpr.subjaxprs import CALLS, programs

_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul"}

Moment = tuple[int, int]
"""When a value is there: the last matrix product or loop it needs, then the equation it is of."""


def places(program: ClosedJaxpr) -> list[int]:
    """The place of each output in the order in which they are ready; equal if at once."""
    found = moments(program)
    order = {moment: place for place, moment in enumerate(sorted(set(found)))}
    return [order[moment] for moment in found]


def moments(program: ClosedJaxpr) -> list[Moment]:
    """When each output of a program is ready; smaller is earlier.

    A backward pass computes products of matrices, and what stands between them costs little. So a
    value is there once the last product that it needs is, wherever its own equation stands: casts
    of all gradients may stand together at the end of a program. Products come in the order of
    their equations, which for a gradient is that of the transposition, last layer first.

    Args:
      program: calls in it are looked into; what one loop makes is ready at once.
    """
    inputs = [(0, 0)] * len(program.jaxpr.invars)
    return _outputs(program.jaxpr, inputs, itertools.count(1))


def _outputs(jaxpr: Jaxpr, inputs: list[Moment], numbers: Iterator[int]) -> list[Moment]:
    known: dict[Any, Moment] = dict.fromkeys(jaxpr.constvars, (0, 0))
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def moment(atom: Any) -> Moment:
        return (0, 0) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        needed = [moment(atom) for atom in eqn.invars]
        inner = list(programs(eqn.params))
        name = eqn.primitive.name
        if name in CALLS and len(inner) == 1 and len(inner[0].invars) == len(needed):
            found = _outputs(inner[0], needed, numbers)
        else:
            now = next(numbers)
            last = now if inner or name in _PRODUCTS else max((m[0] for m in needed), default=0)
            found = [(last, now)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found, strict=True))
    return [moment(atom) for atom in jaxpr.outvars]
