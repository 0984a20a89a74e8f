"""A part of a traced program: the equations behind some of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Literal


def made_without(program: ClosedJaxpr, inputs: Sequence[int]) -> list[bool]:
    """Whether each output is made without certain inputs, and without effects."""
    jaxpr = program.jaxpr
    tainted = {jaxpr.invars[i] for i in inputs}
    for eqn in jaxpr.eqns:
        if eqn.effects or any(not isinstance(x, Literal) and x in tainted for x in eqn.invars):
            tainted.update(eqn.outvars)
    return [isinstance(x, Literal) or x not in tainted for x in jaxpr.outvars]


def part_of(program: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> ClosedJaxpr:
    """The program of some outputs alone, which no inputs but these are needed for."""
    jaxpr = program.jaxpr
    wanted = [jaxpr.outvars[k] for k in outputs]
    needed = {x for x in wanted if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    smaller = jaxpr.replace(
        invars=[jaxpr.invars[i] for i in inputs],
        eqns=kept[::-1],
        outvars=wanted,
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return ClosedJaxpr(smaller, program.consts)
