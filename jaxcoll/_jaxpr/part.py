"""The equations of a traced program behind some of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcoll._jaxpr.subjaxprs import opened


def made_without(program: ClosedJaxpr, inputs: Sequence[int]) -> list[bool]:
    """Whether each output is made without certain inputs, and without effects."""
    jaxpr = program.jaxpr
    tainted = {jaxpr.invars[i] for i in inputs}
    for eqn in jaxpr.eqns:
        if eqn.effects or not tainted.isdisjoint(_variables(eqn.invars)):
            tainted.update(eqn.outvars)
    return [isinstance(x, Literal) or x not in tainted for x in jaxpr.outvars]


def part_of(program: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> ClosedJaxpr:
    """The program of some outputs alone, which no inputs but these are needed for."""
    jaxpr = program.jaxpr
    wanted = [jaxpr.outvars[k] for k in outputs]
    smaller = jaxpr.replace(
        invars=[jaxpr.invars[i] for i in inputs],
        eqns=_behind(jaxpr, wanted, effects=False)[0],
        outvars=wanted,
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return ClosedJaxpr(smaller, program.consts)


def unused_outputs(program: Any, count: int) -> list[int]:
    """Places, among the last `count` outputs, of those that no other output or effect needs."""
    jaxpr: Jaxpr = opened(program)
    first = len(jaxpr.outvars) - count
    needed = _behind(jaxpr, jaxpr.outvars[:first], effects=True)[1]
    last = jaxpr.outvars[first:]
    return [k for k, var in enumerate(last) if isinstance(var, Literal) or var not in needed]


def _behind(
    jaxpr: Jaxpr, wanted: Sequence[Any], *, effects: bool
) -> tuple[list[JaxprEqn], set[Any]]:
    """The equations that these outputs, or also `effects`, need, and the variables of both."""
    needed, kept = _variables(wanted), []
    for eqn in reversed(jaxpr.eqns):
        if (effects and eqn.effects) or not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed |= _variables(eqn.invars)  # an equation is taken to need all of its operands
    return kept[::-1], needed


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {x for x in atoms if not isinstance(x, Literal)}
