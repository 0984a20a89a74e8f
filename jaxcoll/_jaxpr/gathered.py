"""Values that `lax.all_gather` has made the same everywhere, though their types say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxcoll._compat import marks
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.replication import has
from jaxcoll._jaxpr.subjaxprs import RETYPING, names_axis, opened, programs
from jaxcoll._plan.packs.leaves import where

_GATHERED = """\
`{caller}` over {axis!r}: {leaf} was put together by `lax.all_gather`. All replicas hold the same, \
but JAX types it as each replica's own, so its gradient would not be reduced. Put it together with \
`jc.all_gather`, whose result types show as the same; or do so inside the loss, and differentiate \
the parts."""

_SAME, _GATHER, _OWN = range(3)


def check_own_gradients(program: Any, axes: Sequence[str]) -> None:
    """Refuse a typed program that keeps the gradient of a gathered leaf on each replica."""
    if has(opened(program), marks.GRADIENT):
        for axis in axes:
            flow = _Gathered(axis)
            flow.outputs(program, [flow.by_type(var) for var in opened(program).invars])


class _Gathered(AlongAxis):
    """Whether a value is the same by its type, made of gathered ones, or a replica's own."""

    def by_type(self, var: Any) -> int:
        return _OWN if self.varies(var) else _SAME

    def chosen(self, by: int, fact: int) -> int:
        return max(by, fact)

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        return [*map(self.by_type, eqn.outvars)]

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        if names_axis(params, self.axis) and name not in RETYPING:
            if name == "all_gather":
                return [_GATHER] * len(eqn.outvars)
            if name == marks.GRADIENT:
                if params["own"] and ins[1] == _GATHER and self.settled:
                    leaf = where(params["path"])
                    raise ValueError(_GATHERED.format(leaf=leaf, **params))
                return ins[:1]
            return self.opaque(eqn, ins)
        if not ins and not programs(eqn):
            return self.opaque(eqn, ins)
        return super().equation(eqn, ins, jaxpr)
