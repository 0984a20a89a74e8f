"""The order in which the results of a traced program become ready, read from its equations."""

from __future__ import annotations

import itertools

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxcoll._jaxpr.dataflow import Dataflow
from jaxcoll._jaxpr.subjaxprs import called, programs

_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul"}

Moment = tuple[int, int]
"""When a value is ready: the last matrix product or loop it needs, then the equation it is of."""


def places(program: ClosedJaxpr) -> list[int]:
    """The place of each output in the order in which they are ready; equal if at once.

    A backward pass computes products of matrices, and what stands between them costs little. So a
    value is ready once the last product that it needs is, wherever its own equation stands: casts
    of all gradients may stand together at the end of a program. Products come in the order of
    their equations, which for a gradient is that of the transposition, last layer first. What one
    loop makes is ready at once.
    """
    found = _Moments().outputs_of_all(program, (0, 0))
    order = {moment: place for place, moment in enumerate(sorted(set(found)))}
    return [order[moment] for moment in found]


class _Moments(Dataflow[Moment]):
    constant = (0, 0)

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def equation(self, eqn: JaxprEqn, ins: list[Moment], jaxpr: Jaxpr) -> list[Moment]:
        body = called(eqn)
        if body is not None:
            return self.outputs(body, ins)
        now = next(self._numbers)
        product = eqn.primitive.name in _PRODUCTS or programs(eqn)
        last = now if product else max((moment[0] for moment in ins), default=0)
        return [(last, now)] * len(eqn.outvars)
