"""A forward pass over a traced program: for each of its values a fact, of bits that only grow."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._jaxpr.subjaxprs import called, carry_of, opened, root_solver


def joined(facts: Iterable[int]) -> int:
    """Return the fact of a value that is one of several, or made of them; of constants 0."""
    return functools.reduce(operator.or_, facts, 0)


class Dataflow:
    """Facts about each value, bits of a number, from those about the inputs.

    A subclass says what one equation makes of its operands. Calls, loops and branches are read
    here, each program once for the same facts of its inputs; of a loop's carry a fact is kept that
    holds on every turn.
    """

    def __init__(self) -> None:
        # By a program and the facts of its inputs those of its outputs; programs are kept alive
        self._read: dict[Any, tuple[Any, list[int]]] = {}

    def outputs(self, program: Any, inputs: Sequence[int]) -> list[int]:
        """The fact of each output of a program."""
        jaxpr: Jaxpr = opened(program)
        key = id(jaxpr), tuple(inputs)
        if key not in self._read:
            facts: dict[Any, int] = {var: self.captured(var) for var in jaxpr.constvars}
            facts.update(zip(jaxpr.invars, inputs, strict=True))
            for eqn in jaxpr.eqns:
                ins = [0 if isinstance(x, Literal) else facts[x] for x in eqn.invars]
                facts.update(zip(eqn.outvars, self.equation(eqn, ins, jaxpr), strict=True))
            outs = [0 if isinstance(x, Literal) else facts[x] for x in jaxpr.outvars]
            self._read[key] = jaxpr, outs
        return self._read[key][1]

    def captured(self, var: Any) -> int:
        """The fact of a value that a program holds as a constant."""
        raise NotImplementedError

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        """The facts of an equation's results, from those of its operands."""
        raise NotImplementedError

    def chosen(self, by: int, fact: int, eqn: JaxprEqn) -> int:
        """The fact of a value that a branch, or the number of turns, has decided on."""
        raise NotImplementedError

    def decided(self, by: int, bodies: Sequence[Any], eqn: JaxprEqn) -> None:
        """Look at the programs of a branch or loop, and at what decides about them."""
        raise NotImplementedError

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        """The facts of an equation's results that runs programs in a way not known here."""
        raise NotImplementedError

    def inside(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        """The facts of an equation's results that runs programs."""
        name = eqn.primitive.name
        if name == "scan":
            body, first, carried = carry_of(eqn)
            return self._loop(body, ins, first, carried)
        if name == "while":
            return self._while(eqn, ins)
        if name == "cond":
            by, *operands = ins
            branches = [*map(opened, eqn.params["branches"])]
            self.decided(by, branches, eqn)
            outs = zip(*(self.outputs(branch, operands) for branch in branches), strict=True)
            facts = [*map(joined, outs)]
            return [
                fact if _hands_on(branches, k) else self.chosen(by, fact, eqn)
                for k, fact in enumerate(facts)
            ]
        if name == "custom_linear_solve":
            # Of its programs one is run; the others are for its derivatives.
            lengths, solvers = eqn.params["const_lengths"], eqn.params["jaxprs"]
            first = sum(lengths[: solvers._fields.index("solve")])
            operands = [*ins[first : first + lengths.solve], *ins[sum(lengths) :]]
            return self.outputs(solvers.solve, operands)
        if (solve := root_solver(eqn)) is not None:
            return self.outputs(solve, ins[: len(solve.invars)])
        body = called(eqn)
        return self.opaque(eqn, ins) if body is None else self.outputs(body, ins)

    def _loop(self, body: Any, ins: list[int], first: int, carried: int) -> list[int]:
        """The outputs of a loop's body after any number of turns."""
        end = first + carried
        while True:
            outs = self.outputs(body, ins)
            carry = [*map(joined, zip(ins[first:end], outs, strict=False))]
            if carry == ins[first:end]:
                return [*carry, *outs[carried:]]
            ins = [*ins[:first], *carry, *ins[end:]]

    def _while(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        skipped, condition = eqn.params["cond_nconsts"], eqn.params["cond_jaxpr"]
        body, first, carried = carry_of(eqn)
        of_condition, ins = ins[:skipped], ins[skipped:]
        pairs = zip(opened(body).invars[first:], opened(body).outvars, strict=True)
        changes = [a is not b for a, b in pairs]
        while True:
            carry = self._loop(body, ins, first, carried)
            (until,) = self.outputs(condition, [*of_condition, *carry])
            # Where the number of turns differs, so does all that a turn changes.
            chosen = [
                self.chosen(until, fact, eqn) if change else fact
                for fact, change in zip(carry, changes, strict=True)
            ]
            if chosen == carry:
                self.decided(until, [body, condition], eqn)
                return carry
            ins = [*ins[:first], *chosen]


def _hands_on(branches: Sequence[Jaxpr], k: int) -> bool:
    """True if output `k` is one and the same operand in every branch."""
    places = {
        next((i for i, var in enumerate(branch.invars) if var is branch.outvars[k]), None)
        for branch in branches
    }
    return None not in places and len(places) == 1
