"""A forward dataflow analysis of a jaxpr; the fact about each value is a set of bits."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._gradients.proof.subjaxprs import (
    ends_in_error,
    find_callee,
    find_carry,
    open_jaxpr,
    root_solver,
)


def union(facts: Iterable[int]) -> int:
    """Unite facts: of a value that is one of several, or computed from them."""
    return functools.reduce(operator.or_, facts, 0)


class Dataflow:
    """Computes a fact about each value, an integer of bits, from the facts about the inputs.

    A subclass defines the effect of one equation. This class reads calls, loops and branches, each
    program once for the same facts of its inputs. The fact about a loop's carry holds in every
    iteration: bits are only added, so that the analysis ends.
    """

    constant: Callable[[Any], int]  # the fact of a program's constant
    # From an equation and the facts of its operands to those of its results
    equation: Callable[[JaxprEqn, list[int], Jaxpr], list[int]]
    opaque: Callable[[JaxprEqn, list[int]], list[int]]  # the same, if it runs programs somehow
    # The fact of a value that depends on a condition with the first fact
    select: Callable[[int, int, JaxprEqn], int]
    # Refuses programs of a branch or loop for the fact of its condition
    check_choice: Callable[[int, Sequence[Any], JaxprEqn, Sequence[int]], None]

    def __init__(self) -> None:
        # From a program's id and the facts of its inputs to the program, kept alive for its id, and
        # the facts of its outputs
        self._read: dict[Any, tuple[Any, list[int]]] = {}

    def outputs(self, program: Any, inputs: Sequence[int]) -> list[int]:
        jaxpr: Jaxpr = open_jaxpr(program)
        # The program is kept beside its facts: while it lives, no other one gets its `id`.
        key = id(jaxpr), tuple(inputs)
        if key not in self._read:
            facts: dict[Any, int] = {var: self.constant(var) for var in jaxpr.constvars}
            facts.update(zip(jaxpr.invars, inputs, strict=True))
            for eqn in jaxpr.eqns:
                ins = [0 if isinstance(x, Literal) else facts[x] for x in eqn.invars]
                facts.update(zip(eqn.outvars, self.equation(eqn, ins, jaxpr), strict=True))
            outs = [0 if isinstance(x, Literal) else facts[x] for x in jaxpr.outvars]
            self._read[key] = jaxpr, outs
        return self._read[key][1]

    def forget(self) -> None:
        """Read programs anew, after a fact changed that is none of their inputs."""
        self._read.clear()

    def read_programs(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        """Find the facts of the results of an equation that runs programs."""
        name = eqn.primitive.name
        if name == "scan":
            body, first, carried = find_carry(eqn)
            return self._loop(body, ins, first, carried)
        if name == "while":
            return self._while(eqn, ins)
        if name == "cond":
            by, *operands = ins
            branches = [*map(open_jaxpr, eqn.params["branches"])]
            self.check_choice(by, branches, eqn, ins)
            # After a branch that raises there is no value: it is that of the other branches.
            branches = [b for b in branches if not ends_in_error(b)] or branches
            outs = zip(*(self.outputs(branch, operands) for branch in branches), strict=True)
            facts = [*map(union, outs)]
            return [
                fact if _hands_on(branches, k) else self.select(by, fact, eqn)
                for k, fact in enumerate(facts)
            ]
        if name == "custom_linear_solve":
            # It runs one of its programs; the others are for its derivatives.
            lengths, solvers = eqn.params["const_lengths"], eqn.params["jaxprs"]
            first = sum(lengths[: solvers._fields.index("solve")])
            operands = [*ins[first : first + lengths.solve], *ins[sum(lengths) :]]
            return self.outputs(solvers.solve, operands)
        if (solve := root_solver(eqn)) is not None:
            return self.outputs(solve, ins[: len(solve.invars)])
        body = find_callee(eqn)
        return self.opaque(eqn, ins) if body is None else self.outputs(body, ins)

    def _loop(self, body: Any, ins: list[int], first: int, carried: int) -> list[int]:
        """Find the facts of a loop body's outputs after any number of iterations."""
        end = first + carried
        while True:
            outs = self.outputs(body, ins)
            # Bits are only added: a round for each bit of the carry at most.
            carry = [*map(union, zip(ins[first:end], outs, strict=False))]
            if carry == ins[first:end]:
                return [*carry, *outs[carried:]]
            ins = [*ins[:first], *carry, *ins[end:]]

    def _while(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        count, condition = eqn.params["cond_nconsts"], eqn.params["cond_jaxpr"]
        body, first, carried = find_carry(eqn)
        of_condition, ins = ins[:count], ins[count:]
        pairs = zip(open_jaxpr(body).invars[first:], open_jaxpr(body).outvars, strict=True)
        # What the body hands on is the same after any number of iterations.
        changes = [a is not b for a, b in pairs]
        while True:
            carry = self._loop(body, ins, first, carried)
            (continues,) = self.outputs(condition, [*of_condition, *carry])
            # If the number of iterations differs, so does every value that an iteration changes.
            varied = [
                self.select(continues, fact, eqn) if change else fact
                for fact, change in zip(carry, changes, strict=True)
            ]
            if varied == carry:
                self.check_choice(continues, [body, condition], eqn, [*of_condition, *ins])
                return carry
            ins = [*ins[:first], *varied]


def _hands_on(branches: Sequence[Jaxpr], k: int) -> bool:
    """True if output `k` is the same operand in every branch, unchanged."""
    places = {
        next((i for i, var in enumerate(branch.invars) if var is branch.outvars[k]), None)
        for branch in branches
    }
    return None not in places and len(places) == 1
