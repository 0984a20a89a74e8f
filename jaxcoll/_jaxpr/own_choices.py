"""Values that differ because each replica made a choice, which JAX's types do not show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.replication import has
from jaxcoll._jaxpr.subjaxprs import RETYPING, names_axis, opened, programs

_SAME, _OWN, _CHOSEN = range(3)


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


class _OwnChoices(AlongAxis):
    """Whether a value is the same by its type, a replica's own by its type, or by a choice."""

    def of_types(self, program: Any) -> list[int]:
        """The fact of each output, from the types of the inputs."""
        return self.outputs(program, [*map(self._by_type, opened(program).invars)])

    def captured(self, var: Any) -> int:
        return self._by_type(var)

    def chosen(self, by: int, fact: int) -> int:
        return _CHOSEN if by and fact == _SAME else fact

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Any) -> list[int]:
        if names_axis(eqn.params, self.axis) and eqn.primitive.name not in RETYPING:
            return [*map(self._by_type, eqn.outvars)]
        return self.inside(eqn, ins) if programs(eqn) else self.opaque(eqn, ins)

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        if eqn.primitive.name == "optimization_barrier":
            return ins
        return [_CHOSEN if _CHOSEN in ins else self._by_type(out) for out in eqn.outvars]

    def _by_type(self, var: Any) -> int:
        return _OWN if self.varies(var) else _SAME
