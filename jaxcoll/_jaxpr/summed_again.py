"""Wrong uses of what has been reduced: summed once more, or ruled by one replica's part of it.

Our own reductions refuse what is the same on every replica already. `lax.psum` takes it, as it
takes a number that is the same everywhere in order to count replicas, and returns it multiplied by
their number. `lax.pmean` divides by that number at once, so it changes nothing.

A number of one replica's part of a gradient, such as its norm, must not decide how that part is
used: each replica would take another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.subjaxprs import (
    RETYPING,
    at_line,
    equations,
    like,
    names_axis,
    programs,
    shape_of,
)

_MOVES = {"pvary", "pcast", "reshape", "squeeze", "expand_dims", "transpose", "copy", "neg"}
_MOVES |= {"convert_element_type", "broadcast_in_dim", "slice", "concatenate", "div", marks.SAME}

_SUMMED_AGAIN = """\
`lax.psum` over {axis!r}{at} of {like}: it is the same on every replica already, as {maker}, so \
this sum is {n} times too large. Reduce it no more; or, if it is to be counted once for each \
replica, multiply it by `lax.axis_size({axis!r})`."""

_PARTS = "the parts of a sum, of which each replica has its own"

_PARTS_SUMMED = """\
`lax.psum` over {axis!r}{at} of {like}: these are gradients in shards, which the backward pass has \
reduced over it already. Each replica holds another part of them, and a sum or mean adds up what \
does not belong together. Reduce them no more."""

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

_OURS = "the result of a reduction by jaxcoll"
_AUTODIFF = "a gradient that autodiff has summed, which is what JAX's types mean"


def check_sums(program: Any, axes: Mapping[str, int], typed: bool = False) -> None:
    """Refuse a traced step that sums once more what has been reduced already.

    That is the result of a reduction, which is marked in the program, was no more than moved or
    cast since, and is not divided by the number of replicas next. `typed`: types tell replicas
    apart, so that autodiff sums what they have in common.
    """
    for axis, n in axes.items():
        if n > 1:
            _Reduced(axis, n, typed).outputs_of_all(program, "")


@dataclasses.dataclass(eq=False)
class _Reduced(AlongAxis[str]):
    """What has made each value the same along an axis, in words; "" if nothing is known to."""

    constant = ""
    n: int  # replicas
    typed: bool

    def join(self, facts: Sequence[str]) -> str:
        return facts[0] if facts and all(facts) else ""

    def chosen(self, by: str, fact: str) -> str:
        # What is chosen by each replica for itself differs, though every choice is the same.
        return fact if by else ""

    def opaque(self, eqn: JaxprEqn, ins: list[str]) -> list[str]:
        for body in programs(eqn):
            self.outputs_of_all(body, "")
        return [""] * len(eqn.outvars)

    def equation(self, eqn: JaxprEqn, ins: list[str], jaxpr: Jaxpr) -> list[str]:
        name, along = eqn.primitive.name, eqn.params.get("axes", ())
        if name == marks.SAME and self.axis in along:
            return [_OURS]
        if name == marks.PARTS and self.axis in along:
            return [_PARTS]
        if name in (marks.GRADIENT, marks.ONCE):
            return ins[:1]
        if name.startswith("psum"):
            if self.axis not in along:
                return ins
            if self.backward:
                return [_AUTODIFF * self.typed] * len(ins)
            if self.settled:
                self._check(eqn, ins, jaxpr)
        if programs(eqn):
            return self.inside(eqn, ins)
        if self.backward and _AUTODIFF in ins:  # and so is every cotangent made of it
            return [_AUTODIFF * (not self.varies(out)) for out in eqn.outvars]
        # A part stays one, whatever it is divided by.
        moved = _PARTS if _PARTS in ins else self.join(ins)
        return [moved if name in _MOVES else ""] * len(eqn.outvars)

    def _check(self, eqn: JaxprEqn, ins: Sequence[str], jaxpr: Jaxpr) -> None:
        for maker, out in zip(ins, eqn.outvars, strict=True):
            if maker == _PARTS or (maker and not divided(out, jaxpr, self.n)):
                words = _PARTS_SUMMED if maker == _PARTS else _SUMMED_AGAIN
                raise AlreadyReducedError(
                    words.format(
                        axis=self.axis,
                        at=at_line(_compat.users_line(eqn)),
                        like=like(out.aval),
                        maker=maker,
                        n=self.n,
                    )
                )


def divided(out: Any, jaxpr: Jaxpr, n: int) -> bool:
    """Whether a value is only used in its quotient by a multiple of `n`."""
    users = [eqn for eqn in jaxpr.eqns if out in eqn.invars]
    return out not in jaxpr.outvars and all(_divides(eqn, jaxpr, n) for eqn in users)


def _divides(eqn: JaxprEqn, jaxpr: Jaxpr, n: int) -> bool:
    by = eqn.invars[-1]
    # A number is cast, and typed as varying where the other operand is.
    made_by: dict[Any, Any] = {}
    for each in jaxpr.eqns:
        if each.primitive.name in ("pvary", "pcast", "convert_element_type"):
            made_by.update(zip(each.outvars, each.invars, strict=True))
    while not isinstance(by, Literal) and by in made_by:
        by = made_by[by]
    return eqn.primitive.name == "div" and isinstance(by, Literal) and by.val % n == 0


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
