"""Reductions that a loop repeats without need: their results are only added up there.

acc + all_reduce(g), turn after turn, is all_reduce of the sum of the g: one reduction after the
loop does for all. That is reported where four things are read off a traced program:

- what comes out of the reduction is only moved (sliced, reshaped, joined), cast, added to others
  or scaled by a number before it is added to an element of the loop's carry;
- that element of the carry goes into the sum as it is, not scaled as in a running average;
- nothing else in the loop depends on it, so that nothing would miss it before the loop's end;
- what is added does not depend on it either.

Parameters that a loop updates fail the third; the layers of a backward pass, each of whose
gradients is reduced in its own turn and kept, are not added up at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._compat import marks, settings
from jaxcoll._jaxpr.dataflow import Dataflow
from jaxcoll._jaxpr.subjaxprs import at_line, carry_of, equations, like, opened, programs

_REDUCTIONS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "ppermute": "collective-permute",
}
_MOVES = {"reshape", "slice", "squeeze", "transpose", "concatenate", "stack", "unstack"}
_MOVES |= {"expand_dims", "broadcast_in_dim", "rev", "reduce_precision", "copy", "neg"}
_MOVES |= {"add", "add_any", "sub", "pvary", "pcast", "as_invariant", "as_stored", marks.SAME}


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A reduction that could stand after its loop."""

    kind: str  # as HLO has it
    like: str  # its result, as in float32[3, 5]
    nbytes: int  # of the result
    line: str  # of the user's Python that asked for it; "" if that is not known


def moved_reductions(program: Any) -> tuple[Repeated, ...]:
    """Return the reductions behind a loop's results that are all added up or kept."""
    inputs = [_Fact(given=True)] * len(opened(program).invars)
    outs = _Reductions().outputs(program, inputs)
    return tuple(map(_repeated, _union(fact.moved for fact in outs)))


def repeated_reductions(program: Any) -> tuple[Repeated, ...]:
    """The reductions in a traced program that stand in a loop which only adds up their results.

    An empty answer proves nothing: what XLA's partitioner puts into a loop is in no traced
    program, and a `lax.while_loop` with a condition of its own is read like any other.
    """
    found = []
    for eqn in equations(program):
        name = eqn.primitive.name
        if name == "while" or (name == "scan" and eqn.params["length"] > 1):
            found += _added_up(*carry_of(eqn))
    return tuple(map(_repeated, _union(found)))


def described(found: Sequence[Repeated]) -> str:
    """The reductions in words, the largest first."""
    largest = sorted(found, key=lambda each: -each.nbytes)
    words = [f"{each.kind} of {each.like}{at_line(each.line)}" for each in largest[:3]]
    return ", ".join(words) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _repeated(eqn: JaxprEqn) -> Repeated:
    avals: list[Any] = [out.aval for out in eqn.outvars]
    nbytes = sum(aval.size * aval.dtype.itemsize for aval in avals)
    kind, types = _REDUCTIONS[eqn.primitive.name], ", ".join(map(like, avals))
    return Repeated(kind, types, nbytes, settings.users_line(eqn))


def _added_up(body: Any, first: int, carried: int) -> Iterator[tuple[JaxprEqn, ...]]:
    """The reductions whose results a loop's body adds to its carry, and does nothing else with."""
    inputs = [_Fact(given=True)] * len(opened(body).invars)
    for k in range(carried):
        inputs[first + k] = _Fact(given=True, carries=frozenset({k}), carry=k)
    flow = _Reductions()
    outs = flow.outputs(body, inputs)
    for k, out in enumerate(outs[:carried]):
        kept = sum(k in fact.carries for fact in outs)
        if out.carry == k and k not in flow.used and kept == 1:
            yield out.added


class _Fact(NamedTuple):
    """Facts about a value in a loop's body."""

    moved: tuple[JaxprEqn, ...] = ()  # the reductions that it is made of by moves alone
    given: bool = False  # it depends on an input
    number: bool = False  # it is one number in every element
    carries: frozenset[int] = frozenset()  # the elements of the carry that it depends on
    # The element of the carry that it is, but for casts, or that something was added to
    carry: int | None = None
    added: tuple[JaxprEqn, ...] = ()  # the reductions that this something is made of


class _Reductions(Dataflow[_Fact]):
    constant = _Fact()

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()  # elements of the carry that more than a sum depends on

    def join(self, facts: Sequence[_Fact]) -> _Fact:
        if len(set(facts)) == 1:
            return facts[0]
        return self._made_of(facts)._replace(moved=_union(fact.moved for fact in facts))

    def _made_of(self, facts: Sequence[_Fact]) -> _Fact:
        carries = frozenset[int]().union(*(fact.carries for fact in facts))
        self.used |= carries
        return _Fact(given=any(fact.given for fact in facts), carries=carries)

    def chosen(self, by: _Fact, fact: _Fact, eqn: JaxprEqn) -> _Fact:
        # A choice by the replica's place alone is a move, as in an exchange.
        self.used |= by.carries
        return self._made_of([by, fact]) if by.given else fact

    def opaque(self, eqn: JaxprEqn, ins: list[_Fact]) -> list[_Fact]:
        return [self._made_of(ins)] * len(eqn.outvars)

    def equation(self, eqn: JaxprEqn, ins: list[_Fact], jaxpr: Jaxpr) -> list[_Fact]:
        name = eqn.primitive.name
        if name == "while":
            return self.opaque(eqn, ins)
        if programs(eqn):
            return self.inside(eqn, ins)
        if name in ("convert_element_type", "optimization_barrier"):
            return ins
        if name in ("add", "add_any"):
            for mine, other in (ins, ins[::-1]):
                if mine.carry is not None and not mine.added and mine.carry not in other.carries:
                    self.used |= other.carries
                    carries = mine.carries | other.carries
                    return [mine._replace(added=other.moved, carries=carries)]
        made = self._made_of(ins)
        if name in _REDUCTIONS and _sends(eqn):
            return [made._replace(moved=(eqn,))] * len(eqn.outvars)
        moved = _union(fact.moved for fact in self._moved_from(eqn, ins))
        return [made._replace(moved=moved, number=_grows(eqn))] * len(eqn.outvars)

    def _moved_from(self, eqn: JaxprEqn, ins: list[_Fact]) -> list[_Fact]:
        """The operands that an equation moves, casts, scales or adds up."""
        name = eqn.primitive.name
        if name in ("dynamic_slice", "split"):
            return ins[:1]
        if name == "select_n":
            return [] if ins[0].given else ins[1:]
        if name in ("mul", "div"):
            both = zip(eqn.invars, ins, strict=True)
            scaled = [x for atom, x in both if not isinstance(atom, Literal) and not x.number]
            return scaled if len(scaled) == 1 else []
        return ins if name in _MOVES and not _grows(eqn) else []


def _grows(eqn: JaxprEqn) -> bool:
    """True if an equation writes an element to several places."""
    avals: list[Any] = [x.aval for x in (*eqn.invars[:1], *eqn.outvars)]
    return eqn.primitive.name == "broadcast_in_dim" and avals[0].size != avals[1].size


def _sends(eqn: JaxprEqn) -> bool:
    """True if a reduction is over a mapped axis, not over an array's own dimensions alone.

    A reduce-scatter of ours leaves each replica a part, which is why it stands in a loop: what is
    added up there before it would be whole.
    """
    if marks.is_our_reduction(eqn, "reduce_scatter"):
        return False
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = axes if isinstance(axes, tuple | list | frozenset) else (axes,)
    return any(isinstance(a, str) for a in named)


def _union(several: Any) -> tuple[JaxprEqn, ...]:
    return tuple(dict.fromkeys(eqn for found in several for eqn in found))
