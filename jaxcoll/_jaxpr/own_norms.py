"""Numbers of one replica's part of a gradient that decide how that part is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.subjaxprs import RETYPING, at_line, equations, names_axis, programs, shape_of

_NOTHING, _PART, _NUMBER = range(3)
_MARKS = {marks.GRADIENT, marks.ONCE}
_UNCHANGED = {*RETYPING, _compat.THROUGH}
_MIXING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce", "argmax", "argmin"}
_MIXING |= {"cumsum", "cumprod", "cummax", "cummin", "dot_general", "sort", "top_k"}
"""What makes numbers of several elements: a row's mean, of a pack whose rows are no leaf's."""

_OWN_NORM = """\
`data_parallel`: gradients in shards over {axis!r} are scaled, or chosen, by a number of this \
replica's part alone{at}, such as its norm: each replica would take another one, and none that of \
the whole gradient. What to do: give `jc.sharded_optimizer` an optimizer of single elements and \
`max_norm`, in place of `optax.clip_by_global_norm` and the like; or compute the number over all \
parts, by `jc.global_norm(gradients, {axis!r})` or `jc.all_finite(gradients, {axis!r})`."""


def check_own_norms(program: Any, axes: Mapping[str, int]) -> None:
    """Refuse a traced step in which a number of a part of a gradient decides about that part."""
    marked = {
        axis
        for eqn, _ in equations(program)
        if eqn.primitive.name == marks.PARTS
        for axis in eqn.params["axes"]
    }
    for axis in sorted(marked):
        if axes.get(axis, 1) > 1:
            _OwnNorms(axis).outputs_of_all(program, _NOTHING)


class _OwnNorms(AlongAxis[int]):
    """Whether each value is a part of a gradient along an axis, or numbers of such a part."""

    def chosen(self, by: int, fact: int) -> int:
        if self.settled and (by, fact) == (_NUMBER, _PART):
            raise ValueError(_OWN_NORM.format(axis=self.axis, at=""))
        return fact

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        return [_NOTHING] * len(eqn.outvars)

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name = eqn.primitive.name
        if name == marks.PARTS:
            return [_PART] if self.axis in eqn.params["axes"] else ins
        if name == marks.SAME and self.axis in eqn.params["axes"]:
            return [_NOTHING]
        if programs(eqn):
            return self.inside(eqn, ins)
        if name in _MARKS:
            return ins[:1]
        if name not in _UNCHANGED and names_axis(eqn.params, self.axis):
            return [_NOTHING] * len(eqn.outvars)
        if self.settled and _PART in ins and _NUMBER in ins:
            raise ValueError(_OWN_NORM.format(axis=self.axis, at=at_line(_compat.users_line(eqn))))
        fact, mixes = self.join(ins), name in _MIXING
        return [
            _NUMBER if fact == _PART and (mixes or not shape_of(x)) else fact for x in eqn.outvars
        ]
