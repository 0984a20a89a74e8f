"""Values that differ between replicas although JAX's types say that they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.subjaxprs import RETYPING, is_ref, names_axis, opened, programs

_SAME, _OWN, _HIDDEN = range(3)
_EACH_BY_ITSELF = {"optimization_barrier", _compat.THROUGH}
_LIKE_THE_FIRST = {marks.GRADIENT, "needing", "report_to_host"}
_OF_THE_HOST = ("io_callback", "infeed", "rng_uniform")


def hidden_outputs(program: Any, axes: Sequence[str]) -> list[frozenset[str]]:
    """Along which of `axes` each output of a typed program differs although its type is the same.

    JAX types the result of a `lax.cond` by its branches, and what a `lax.while_loop` carries by
    its body: that each replica chooses the branch, or the number of turns, is in no type. Nor is
    what comes from the host, or what a solver's function or a reference brings along.
    """
    found = {axis: _Hidden(axis).of_types(program) for axis in axes}
    return [
        frozenset(axis for axis in axes if found[axis][k] == _HIDDEN)
        for k in range(len(opened(program).outvars))
    ]


class _Hidden(AlongAxis):
    """Whether a value is the same by its type, a replica's own by its type, or so unseen."""

    def of_types(self, program: Any) -> list[int]:
        """The fact of each output, from the types of the inputs."""
        return self.outputs(program, [*map(self._by_type, opened(program).invars)])

    def captured(self, var: Any) -> int:
        return self._by_type(var)

    def chosen(self, by: int, fact: int) -> int:
        return _HIDDEN if by and fact == _SAME else fact

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Any) -> list[int]:
        if names_axis(eqn.params, self.axis) and eqn.primitive.name not in RETYPING:
            in_groups = eqn.params.get("axis_index_groups") is not None
            return [_HIDDEN if in_groups else self._by_type(out) for out in eqn.outvars]
        outs = self.inside(eqn, ins) if programs(eqn) else self.opaque(eqn, ins)
        return [*map(self._seen, outs, eqn.outvars)]

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name in _EACH_BY_ITSELF or ("axes" in eqn.params and len(ins) == len(eqn.outvars)):
            return ins
        if name in _OF_THE_HOST or any(map(is_ref, eqn.invars)):
            return [_HIDDEN] * len(eqn.outvars)
        return [self.join(ins[:1] if name in _LIKE_THE_FIRST else ins)] * len(eqn.outvars)

    def _seen(self, fact: int, var: Any) -> int:
        """A fact beside the type that shows it, or does not."""
        by_type = self._by_type(var)
        return _HIDDEN if fact == _HIDDEN or fact > by_type else by_type

    def _by_type(self, var: Any) -> int:
        return _OWN if self.varies(var) else _SAME
