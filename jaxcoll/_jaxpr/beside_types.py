"""Where JAX's types mislead: what was gathered looks different, own choices look the same."""

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

_SAME, _GATHER, _OWN, _CHOSEN = range(4)


def check_own_gradients(program: Any, axes: Sequence[str]) -> None:
    """Refuse a typed program that keeps the gradient of a gathered leaf on each replica."""
    if has(opened(program), marks.GRADIENT):
        for axis in axes:
            _Gathered(axis).of_types(program)


def chosen_outputs(program: Any, axes: Sequence[str]) -> list[frozenset[str]]:
    """Along which of `axes` each output of a typed program differs although its type is the same.

    JAX types the result of a `lax.cond` by its branches, and what a `lax.while_loop` carries by
    its body: that each replica chooses the branch, or the number of turns, is in no type.
    """
    jaxpr = opened(program)
    if not (has(jaxpr, "cond") or has(jaxpr, "while")):
        return [frozenset()] * len(jaxpr.outvars)
    found = {axis: _OwnChoices(axis).of_types(program) for axis in axes}
    return [
        frozenset(axis for axis in axes if found[axis][k] == _CHOSEN)
        for k in range(len(jaxpr.outvars))
    ]


class _ByType(AlongAxis):
    """Whether a value is the same by its type, or a replica's own."""

    def of_types(self, program: Any) -> list[int]:
        """The fact of each output, from the types of the inputs."""
        return self.outputs(program, [*map(self.by_type, opened(program).invars)])

    def by_type(self, var: Any) -> int:
        return _OWN if self.varies(var) else _SAME


class _Gathered(_ByType):
    """Whether a value is the same by its type, made of gathered ones, or a replica's own."""

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


class _OwnChoices(_ByType):
    """Whether a value is the same by its type, a replica's own by its type, or by a choice."""

    def captured(self, var: Any) -> int:
        return self.by_type(var)

    def chosen(self, by: int, fact: int) -> int:
        return _CHOSEN if by and fact == _SAME else fact

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        if names_axis(eqn.params, self.axis) and eqn.primitive.name not in RETYPING:
            return [*map(self.by_type, eqn.outvars)]
        return self.inside(eqn, ins) if programs(eqn) else self.opaque(eqn, ins)

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        if eqn.primitive.name == "optimization_barrier":
            return ins
        return [_CHOSEN if _CHOSEN in ins else self.by_type(out) for out in eqn.outvars]
