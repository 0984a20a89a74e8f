"""Reductions that a loop repeats without need: their results are only added up there.

acc + all_reduce(g), turn after turn, is all_reduce of the sum of the g: one reduction after the
loop does for all. That is so, and is said, where four things are read off a traced program:

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
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._jaxpr.replication import scan_parts
from jaxcoll._jaxpr.subjaxprs import CALLS, opened, programs

_REDUCTIONS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "ppermute": "collective-permute",
}
_MOVES = {"reshape", "slice", "dynamic_slice", "squeeze", "transpose", "concatenate", "split"}
_MOVES |= {"stack", "unstack", "expand_dims", "rev"}
_MOVES |= {"convert_element_type", "reduce_precision", "copy", "neg", "add", "add_any", "sub"}
_MOVES |= {"pvary", "pcast", "as_invariant", "as_stored", "optimization_barrier", _compat.SAME}
_CHOICES = {"select_n", "cond"}


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A reduction that could stand after its loop.

    Attributes:
      kind: as HLO has it.
      like: its result, as in float32[3, 5].
      nbytes: of the result.
      line: of the user's Python that asked for it; "" if that is not known.
    """

    kind: str
    like: str
    nbytes: int
    line: str


class _Step(NamedTuple):
    """One equation after calls were opened; a number for each value, None for a literal."""

    eqn: JaxprEqn
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]


class _Flat(NamedTuple):
    steps: list[_Step]
    ins: list[int]
    outs: list[int | None]

    def made_by(self) -> dict[int | None, _Step]:
        return {out: step for step in self.steps for out in step.outs}


def moved_reductions(program: Any) -> tuple[Repeated, ...]:
    """Of a loop's body whose results are all added up or kept: the reductions they come from.

    Args:
      program: the traced body.

    Returns:
      Each reduction once.
    """
    flat = _flat(opened(program))
    found = [eqn for out in flat.outs for eqn in _behind(flat, out)[0]]
    return tuple(map(_repeated, dict.fromkeys(found)))


def repeated_reductions(program: Any) -> tuple[Repeated, ...]:
    """The reductions in a traced program that stand in a loop which only adds up their results.

    Args:
      program: any traced program.

    Returns:
      Each once, in the program's order. An empty answer is no proof: what XLA's partitioner puts
      into a loop is in no traced program, and `lax.while_loop`s with a condition of their own are
      read like any other.
    """
    return tuple(map(_repeated, dict.fromkeys(_in_loops(opened(program)))))


def told(found: Sequence[Repeated]) -> str:
    """The reductions in words, the largest first."""
    largest = sorted(found, key=lambda each: -each.nbytes)
    said = [f"{e.kind} of {e.like}" + (f" ({e.line})" if e.line else "") for e in largest[:3]]
    return ", ".join(said) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _repeated(eqn: JaxprEqn) -> Repeated:
    kind, avals = _REDUCTIONS[eqn.primitive.name], [_type(out) for out in eqn.outvars]
    like = ", ".join(f"{a.dtype.name}[{', '.join(map(str, a.shape))}]" for a in avals)
    nbytes = sum(a.size * a.dtype.itemsize for a in avals)
    return Repeated(kind, like, nbytes, _compat.users_line(eqn))


def _in_loops(jaxpr: Any) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "scan" and eqn.params["length"] > 1:
            first, carried = scan_parts(eqn)
            yield from _added_up(eqn.params["jaxpr"], first, carried)
        elif name == "while":
            yield from _added_up(
                eqn.params["body_jaxpr"], eqn.params["body_nconsts"], len(eqn.outvars)
            )
        for body in programs(eqn.params):
            yield from _in_loops(body)


def _added_up(body: Any, first: int, carried: int) -> Iterator[JaxprEqn]:
    """The reductions whose results a loop's body adds to its carry, and does nothing else with."""
    flat = _flat(opened(body))
    made_by = flat.made_by()
    for accumulator, out in zip(flat.ins[first:], flat.outs[:carried], strict=False):
        sums = _casts(out, made_by)
        step = made_by.get(sums[-1])
        if step is None or step.eqn.primitive.name not in ("add", "add_any"):
            continue
        for mine, other in (step.ins, step.ins[::-1]):
            before = _casts(mine, made_by)
            if before[-1] != accumulator:
                continue
            found, _ = _behind(flat, other)
            touched = _depending(flat, accumulator)
            seen = {*before, *sums}
            kept = sum(value in seen for value in flat.outs)
            if found and other not in touched and touched <= seen and kept == 1:
                yield from found


def _casts(value: int | None, made_by: Mapping[int | None, _Step]) -> list[int | None]:
    """A value, and back through changes of its type what it was before."""
    found = [value]
    while (step := made_by.get(found[-1])) and step.eqn.primitive.name == "convert_element_type":
        found.append(step.ins[0])
    return found


def _depending(flat: _Flat, *values: int) -> set[int | None]:
    touched: set[int | None] = {*values}
    for step in flat.steps:
        if touched.intersection(step.ins):
            touched.update(step.outs)
    return touched


def _behind(flat: _Flat, value: int | None) -> tuple[list[JaxprEqn], set[int]]:
    """The reductions that a value is made of by moves alone; and so the inputs, by position."""
    made_by = flat.made_by()
    told = _depending(flat, *flat.ins)
    waiting, seen = [value], {value}
    found: list[JaxprEqn] = []
    while waiting:
        at = waiting.pop()
        step = made_by.get(at)
        if step is None:
            continue
        if step.eqn.primitive.name in _REDUCTIONS and _sends(step.eqn):
            found.append(step.eqn)
            continue
        moved_from = _chosen_from if step.eqn.primitive.name in _CHOICES else _moved_from
        if moved_from is _chosen_from and step.ins[0] in told:
            continue  # not by the replica's place, as in an exchange
        inner, onward = moved_from(step, step.outs.index(at), made_by)
        found += inner
        waiting += [x for x in onward if x is not None and x not in seen]
        seen.update(onward)
    return found, {flat.ins.index(x) for x in seen if x in flat.ins}


def _sends(eqn: JaxprEqn) -> bool:
    """Whether a reduction is over a mapped axis, not over an array's own dimensions alone."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = axes if isinstance(axes, tuple | list | frozenset) else (axes,)
    return any(isinstance(a, str) for a in named)


def _moved_from(
    step: _Step, k: int, made_by: Mapping[int | None, _Step]
) -> tuple[list[JaxprEqn], Sequence[int | None]]:
    """Behind one equation's k-th result: reductions inside it, and operands it is moved from."""
    name = step.eqn.primitive.name
    if name == "optimization_barrier":
        return [], [step.ins[k]]
    if name in ("dynamic_slice", "split"):
        return [], step.ins[:1]
    if name in _MOVES or (name == "broadcast_in_dim" and not _grows(step.eqn)):
        return [], step.ins
    if name in ("mul", "div"):
        scaled = [x for x in step.ins if x is not None and not _is_number(made_by.get(x))]
        return [], scaled if len(scaled) == 1 else []
    if name == "scan":
        return _inside(step.eqn.params["jaxpr"], step.ins, k)
    return [], []


def _chosen_from(step: _Step, k: int, _: Any) -> tuple[list[JaxprEqn], Sequence[int | None]]:
    """Likewise, of a choice between values or between programs."""
    if step.eqn.primitive.name == "select_n":
        return [], step.ins[1:]
    inside = [_inside(branch, step.ins[1:], k) for branch in step.eqn.params["branches"]]
    return [eqn for found, _ in inside for eqn in found], [x for _, ins in inside for x in ins]


def _inside(
    body: Any, ins: Sequence[int | None], k: int
) -> tuple[list[JaxprEqn], list[int | None]]:
    flat = _flat(opened(body))
    found, positions = _behind(flat, flat.outs[k])
    return found, [ins[i] for i in positions]


def _grows(eqn: JaxprEqn) -> bool:
    return _type(eqn.invars[0]).size != _type(eqn.outvars[0]).size


def _type(atom: Any) -> Any:
    return atom.aval


def _is_number(step: _Step | None) -> bool:
    """Whether an array is one number in every element."""
    return step is not None and step.eqn.primitive.name == "broadcast_in_dim" and _grows(step.eqn)


def _flat(jaxpr: Any) -> _Flat:
    """A program with the calls in it opened, so that a value is followed through them."""
    numbers = itertools.count()
    steps: list[_Step] = []

    def walk(jaxpr: Any, ins: Sequence[int | None]) -> list[int | None]:
        known: dict[Any, int | None] = dict(zip(jaxpr.invars, ins, strict=True))
        known |= {var: next(numbers) for var in jaxpr.constvars}

        def number(atom: Any) -> int | None:
            return None if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            given = tuple(map(number, eqn.invars))
            bodies = list(programs(eqn.params))
            if (
                eqn.primitive.name in CALLS
                and len(bodies) == 1
                and len(bodies[0].invars) == len(given)
            ):
                outs = walk(bodies[0], given)
            else:
                outs = [next(numbers) for _ in eqn.outvars]
                steps.append(_Step(eqn, given, tuple(outs)))
            known.update(zip(eqn.outvars, outs, strict=True))
        return list(map(number, jaxpr.outvars))

    ins = [next(numbers) for _ in jaxpr.invars]
    return _Flat(steps, ins, walk(jaxpr, ins))
