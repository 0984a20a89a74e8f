"""A forward pass over a traced program: one fact for each of its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._jaxpr.subjaxprs import called, carry_of, opened, programs

Fact = TypeVar("Fact")


class Dataflow(Generic[Fact]):
    """Facts about each value, from those about the inputs.

    A subclass says what one equation makes of its operands and how facts meet (`join`, `chosen`).
    These are monotone, so that loops settle, and facts are hashable: a program is read once for
    the same facts of its inputs. Calls, loops and branches are read here; of a loop's carry a fact
    is kept that holds on every turn.
    """

    constant: Any
    """The fact of constants."""

    def __init__(self) -> None:
        # By a program and the facts of its inputs those of its outputs; programs are kept alive
        self._read: dict[Any, tuple[Any, list[Fact]]] = {}

    def outputs(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        """The fact of each output of a program."""
        jaxpr: Jaxpr = opened(program)
        key = id(jaxpr), tuple(inputs)
        if key not in self._read:
            constant = self.constant
            facts: dict[Any, Fact] = {var: self.captured(var) for var in jaxpr.constvars}
            facts.update(zip(jaxpr.invars, inputs, strict=True))
            for eqn in jaxpr.eqns:
                ins = [constant if isinstance(x, Literal) else facts[x] for x in eqn.invars]
                facts.update(zip(eqn.outvars, self.equation(eqn, ins, jaxpr), strict=True))
            outs = [constant if isinstance(x, Literal) else facts[x] for x in jaxpr.outvars]
            self._read[key] = jaxpr, outs
        return self._read[key][1]

    def captured(self, var: Any) -> Fact:
        """The fact of a value that a program holds as a constant."""
        return self.constant

    def equation(self, eqn: JaxprEqn, ins: list[Fact], jaxpr: Jaxpr) -> list[Fact]:
        """The facts of an equation's results, from those of its operands."""
        return self.inside(eqn, ins) if programs(eqn) else [self.join(ins)] * len(eqn.outvars)

    def join(self, facts: Sequence[Fact]) -> Fact:
        """The fact of a value that is one of several, or made of them."""
        raise NotImplementedError

    def chosen(self, by: Fact, fact: Fact, eqn: JaxprEqn) -> Fact:
        """The fact of a value that a branch, or the number of turns, has decided on."""
        return fact

    def decided(self, by: Fact, bodies: Sequence[Any], eqn: JaxprEqn) -> None:
        """Look at the programs of a branch or loop, and at what decides about them."""

    def opaque(self, eqn: JaxprEqn, ins: list[Fact]) -> list[Fact]:
        """The facts of an equation's results that runs programs in a way not known here."""
        raise NotImplementedError

    def inside(self, eqn: JaxprEqn, ins: list[Fact]) -> list[Fact]:
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
            joined = [*map(self.join, outs)]
            return [
                fact if _hands_on(branches, k) else self.chosen(by, fact, eqn)
                for k, fact in enumerate(joined)
            ]
        if name == "custom_linear_solve":
            # Of its programs one is run; the others are for its derivatives.
            lengths, solvers = eqn.params["const_lengths"], eqn.params["jaxprs"]
            first = sum(lengths[: solvers._fields.index("solve")])
            operands = [*ins[first : first + lengths.solve], *ins[sum(lengths) :]]
            return self.outputs(solvers.solve, operands)
        body = called(eqn)
        return self.opaque(eqn, ins) if body is None else self.outputs(body, ins)

    def _loop(self, body: Any, ins: list[Fact], first: int, carried: int) -> list[Fact]:
        """The outputs of a loop's body after any number of turns."""
        end = first + carried
        while True:
            outs = self.outputs(body, ins)
            carry = [*map(self.join, zip(ins[first:end], outs, strict=False))]
            if carry == ins[first:end]:
                return [*carry, *outs[carried:]]
            ins = [*ins[:first], *carry, *ins[end:]]

    def _while(self, eqn: JaxprEqn, ins: list[Fact]) -> list[Fact]:
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
