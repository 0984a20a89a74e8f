"""A traced program as a value: read, and cut, before its equations become part of another."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxcoll._jaxpr.dataflow import Dataflow
from jaxcoll._jaxpr.subjaxprs import called, opened, programs

_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul"}

Moment = tuple[int, int]
"""When a value is ready: the last matrix product or loop it needs, then the equation it is of."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a function did when it was traced, with its arguments and whatever it captured."""

    # Its equations. Arguments, but for `inputs`, and captured values are constants of it; its
    # outputs are the arrays among the leaves of the result, in the order of the tree
    program: ClosedJaxpr
    treedef: jax.tree_util.PyTreeDef  # of the result
    # For each leaf of the result None if it is an array, else the leaf in a tuple
    others: tuple[tuple[Any] | None, ...]

    def evaluate(self) -> Any:
        """The result, of equations that are now part of the program at hand."""
        return self.result(self.outputs())

    def outputs(self, *inputs: Any) -> list[jax.Array]:
        """The arrays of the result, likewise; for inputs like those that it was traced with."""
        return jaxpr_as_fun(self.program)(*jax.tree.leaves(inputs))

    def result(self, outputs: Sequence[Any]) -> Any:
        """A tree like the result, with `outputs` where the arrays are."""
        arrays = iter(outputs)
        leaves = [next(arrays) if other is None else other[0] for other in self.others]
        return jax.tree.unflatten(self.treedef, leaves)


def with_captured(program: Traced) -> tuple[Traced, list[Any]]:
    """The program with the traced values that it captures as inputs behind its own, and these."""
    jaxpr = program.program.jaxpr
    pairs = [*zip(jaxpr.constvars, program.program.consts, strict=True)]
    captured = {var: const for var, const in pairs if isinstance(const, Tracer)}
    held = {var: const for var, const in pairs if var not in captured}
    jaxpr = jaxpr.replace(
        constvars=[*held],
        invars=[*jaxpr.invars, *captured],
        debug_info=jaxpr.debug_info._replace(arg_names=None),
    )
    closed = ClosedJaxpr(jaxpr, [*held.values()])
    return dataclasses.replace(program, program=closed), [*captured.values()]


def traced(
    fun: Callable[..., Any], *args: Any, inputs: tuple[Any, ...] = (), **kwargs: Any
) -> Traced:
    """Trace `fun(*inputs, *args, **kwargs)` without putting its equations into the program at hand.

    Law: `traced(fun, ...).evaluate()` is `fun(...)`, in value, types and source lines; `fun` is
    called once. Leaves of the result that are not a `jax.Array` are those of that call. `inputs`
    are variables of the program; all else, and what `fun` captures, may belong to that at hand.
    """
    found: list[tuple[Any, tuple[tuple[Any] | None, ...]]] = []

    def program(*inputs: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(fun(*inputs, *args, **kwargs))
        found.append((treedef, tuple(None if isinstance(x, jax.Array) else (x,) for x in leaves)))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    closed = jax.make_jaxpr(program)(*inputs)
    ((treedef, others),) = found
    return Traced(closed, treedef, others)


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


def places(program: ClosedJaxpr) -> list[int]:
    """The place of each output in the order in which they are ready; equal if at once.

    A backward pass computes products of matrices, and what stands between them costs little. So a
    value is ready once the last product that it needs is, wherever its own equation stands: casts
    of all gradients may stand together at the end of a program. Products come in the order of
    their equations, which for a gradient is that of the transposition, last layer first. What one
    loop makes is ready at once.
    """
    found = _Moments().outputs_of_all(program, (0, 0))
    order = {moment: place for place, moment in enumerate(sorted(set(found)))}
    return [order[moment] for moment in found]


class _Moments(Dataflow[Moment]):
    constant = (0, 0)

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def equation(self, eqn: JaxprEqn, ins: list[Moment], jaxpr: Jaxpr) -> list[Moment]:
        body = called(eqn)
        if body is not None:
            return self.outputs(body, ins)
        now = next(self._numbers)
        product = eqn.primitive.name in _PRODUCTS or programs(eqn)
        last = now if product else max((moment[0] for moment in ins), default=0)
        return [(last, now)] * len(eqn.outvars)
