"""Where JAX's types mislead: what was gathered looks different, what differs looks the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.replication import GRADIENT_OF_DIFFERENT, has
from jaxcoll._jaxpr.subjaxprs import RETYPING, at_line, is_ref, like, names_axis, opened, programs
from jaxcoll._plan.packs.leaves import where

_GATHERED = """\
`{caller}` over {axis!r}: {leaf} was put together by `lax.all_gather`. All replicas hold the same, \
but JAX types it as each replica's own, so its gradient would not be reduced. Put it together with \
`jc.all_gather`, whose result types show as the same; or do so inside the loss, and differentiate \
the parts."""

_CHOSEN = """\
`data_parallel`: the derivative of a loss that is reduced over {axis!r} goes through a branch or a \
loop that each replica chooses for itself{at}. JAX types what comes out of it as the same \
everywhere, {like}, and adds up the replicas' parts before the choice and not after it. What to \
do: take the gradient with `jc.grad` or `jc.value_and_grad` of this replica's own loss, or choose \
by `jnp.where`."""

_SAME, _GATHER, _OWN, _HIDDEN = range(4)
_EACH_BY_ITSELF = {"optimization_barrier", _compat.THROUGH}
_LIKE_THE_FIRST = {marks.GRADIENT, "needing", "report_to_host"}
_OF_THE_HOST = ("io_callback", "infeed", "rng_uniform")


def check_own_gradients(program: Any, axes: Sequence[str]) -> None:
    """Refuse a typed program that keeps the gradient of a gathered leaf on each replica."""
    if has(opened(program), marks.GRADIENT):
        for axis in axes:
            _Gathered(axis).of_types(program)


def hidden_outputs(program: Any, axes: Sequence[str]) -> list[frozenset[str]]:
    """Along which of `axes` each output of a typed program differs although its type is the same.

    JAX types the result of a `lax.cond` by its branches, and what a `lax.while_loop` carries by
    its body: that each replica chooses the branch, or the number of turns, is in no type. Nor is
    what comes from the host, or what a solver's function or a reference brings along.

    Raises:
      ValueError: such a value is one of whose gradients a mean or sum is going to be made, or a
        cotangent, which autodiff has reduced too early.
    """
    found = {axis: _Hidden(axis).of_types(program) for axis in axes}
    return [
        frozenset(axis for axis in axes if found[axis][k] == _HIDDEN)
        for k in range(len(opened(program).outvars))
    ]


class _ByType(AlongAxis[int]):
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


class _Hidden(_ByType):
    """Whether a value is the same by its type, a replica's own by its type, or its own unseen."""

    def captured(self, var: Any) -> int:
        return self.by_type(var)

    def chosen(self, by: int, fact: int) -> int:
        return _HIDDEN if by and fact == _SAME else fact

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        if names_axis(params, self.axis) and name not in RETYPING:
            common = name == marks.GRADIENT and not params["own"]
            if common and ins[1] == _HIDDEN and self.settled:
                leaf = where(params["path"])
                raise ValueError(GRADIENT_OF_DIFFERENT.format(leaf=leaf, **params))
            if name == marks.SAME:  # which `invariant` vouches for
                return [*map(self._seen, ins, eqn.outvars)]
            in_groups = params.get("axis_index_groups") is not None
            return [_HIDDEN if in_groups else self.by_type(out) for out in eqn.outvars]
        outs = self.inside(eqn, ins) if programs(eqn) else self.opaque(eqn, ins)
        found = [*map(self._seen, outs, eqn.outvars)]
        if self.backward and self.settled and not marks.is_made_again(eqn):
            for fact, out in zip(found, eqn.outvars, strict=True):
                if fact == _HIDDEN and not self.varies(out):
                    at = at_line(_compat.users_line(eqn))
                    raise ValueError(_CHOSEN.format(axis=self.axis, at=at, like=like(out.aval)))
        return found

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name in _EACH_BY_ITSELF or ("axes" in eqn.params and len(ins) == len(eqn.outvars)):
            return ins
        if name in _OF_THE_HOST or any(map(is_ref, eqn.invars)):
            return [_HIDDEN] * len(eqn.outvars)
        return [self.join(ins[:1] if name in _LIKE_THE_FIRST else ins)] * len(eqn.outvars)

    def _seen(self, fact: int, var: Any) -> int:
        """A fact beside the type that shows it, or does not."""
        by_type = self.by_type(var)
        return _HIDDEN if fact == _HIDDEN or fact > by_type else by_type
