"""A forward dataflow analysis of a traced program: one fact for each of its values."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.subjaxprs import called, carry_of, opened, programs

Fact = TypeVar("Fact")


class Dataflow(Generic[Fact]):
    """What is known of each value, from what is known of the inputs.

    A subclass says what one equation makes of its operands (`equation`, `opaque`) and how facts
    meet (`join`, `chosen`), which must be monotone. Calls, loops and branches are read here: of a
    loop's carry a fact is kept that holds on every turn.
    """

    constant: Any
    """The fact of constants."""

    settled = True
    """False while a loop's carry may still change, when nothing is to be reported yet."""

    backward = False
    """Whether the equation at hand is part of a backward pass."""

    def outputs_of_all(self, program: Any, fact: Any) -> list[Fact]:
        """The fact of each output, if every input has this one."""
        return self.outputs(program, [fact] * len(opened(program).invars))

    def outputs(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        """The fact of each output."""
        jaxpr: Jaxpr = opened(program)
        known: dict[Any, Fact] = {var: self.captured(var) for var in jaxpr.constvars}
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> Fact:
            return self.literal(atom) if isinstance(atom, Literal) else known[atom]

        outside = self.backward
        for eqn in jaxpr.eqns:
            self.backward = outside or marks.in_backward(eqn)
            found = self.equation(eqn, [*map(of, eqn.invars)], jaxpr)
            known.update(zip(eqn.outvars, found, strict=True))
        self.backward = outside
        return [*map(of, jaxpr.outvars)]

    def captured(self, var: Any) -> Fact:
        """The fact of a value that a program holds as a constant."""
        return self.constant

    def literal(self, literal: Literal) -> Fact:
        """The fact of a number written into an equation."""
        return self.constant

    def equation(self, eqn: JaxprEqn, ins: list[Fact], jaxpr: Jaxpr) -> list[Fact]:
        """The facts of an equation's results, from those of its operands."""
        return self.inside(eqn, ins) if programs(eqn) else [self.join(ins)] * len(eqn.outvars)

    def join(self, facts: Sequence[Fact]) -> Fact:
        """The fact of a value that is one of several, or made of them."""
        raise NotImplementedError

    def chosen(self, by: Fact, fact: Fact) -> Fact:
        """The fact of a value that a branch, or the number of turns, has decided on."""
        return fact

    def opaque(self, eqn: JaxprEqn, ins: list[Fact]) -> list[Fact]:
        """The facts of an equation's results that runs programs in a way not known here."""
        raise NotImplementedError

    def row(self, fact: Fact) -> Fact:
        """The fact of what is sliced from, or stacked to, an array by a `scan`."""
        return fact

    def inside(self, eqn: JaxprEqn, ins: list[Fact]) -> list[Fact]:
        """The facts of an equation's results that runs programs."""
        name = eqn.primitive.name
        if name == "scan":
            body, first, carried = carry_of(eqn)
            turns = first + carried
            given = [*ins[:turns], *map(self.row, ins[turns:])]
            outs = self._loop(body, given, first, carried)
            return [*outs[:carried], *map(self.row, outs[carried:])]
        if name == "while":
            return self._while(eqn, ins)
        if name == "cond":
            by, *operands = ins
            branches = [*map(opened, eqn.params["branches"])]
            found = [self.outputs(branch, operands) for branch in branches]
            return [
                self.join(outs) if _hands_on(branches, k) else self.chosen(by, self.join(outs))
                for k, outs in enumerate(zip(*found, strict=True))
            ]
        if name == "custom_linear_solve":
            # Of its programs one is run; the others are for its derivatives.
            lengths, solvers = eqn.params["const_lengths"], eqn.params["jaxprs"]
            first = sum(lengths[: solvers._fields.index("solve")])
            given = [*ins[first : first + lengths.solve], *ins[sum(lengths) :]]
            return self.outputs(solvers.solve, given)
        body = called(eqn)
        return self.opaque(eqn, ins) if body is None else self.outputs(body, ins)

    def _while(self, eqn: JaxprEqn, ins: list[Fact]) -> list[Fact]:
        skipped = eqn.params["cond_nconsts"]
        body, first, carried = carry_of(eqn)
        of_condition, given = ins[:skipped], ins[skipped:]
        with self.unsettled():
            carry = self._loop(body, given, first, carried)
            (until,) = self.outputs(eqn.params["cond_jaxpr"], [*of_condition, *carry])
        # Where the number of turns differs, so does all that a turn changes, in the body as well.
        changed = map(operator.is_not, opened(body).invars[first:], opened(body).outvars)
        carry = [self.chosen(until, x) if by else x for x, by in zip(carry, changed, strict=True)]
        given = [*given[:first], *carry]
        outs = self._loop(body, given, first, carried)
        self.outputs(eqn.params["cond_jaxpr"], [*of_condition, *outs])
        return outs

    def _loop(self, body: Any, ins: list[Fact], first: int, carried: int) -> list[Fact]:
        """The outputs of a loop's body after any number of turns."""
        end = first + carried
        with self.unsettled():
            while True:
                outs = self.outputs(body, ins)
                carry = [*map(self.join, zip(ins[first:end], outs, strict=False))]
                if carry == ins[first:end]:
                    break
                ins = [*ins[:first], *carry, *ins[end:]]
        # Once more, now that the carry has settled: only this reading may report.
        return [*carry, *self.outputs(body, ins)[carried:]]

    @contextlib.contextmanager
    def unsettled(self) -> Iterator[None]:
        """Read what is in here without reporting."""
        before, self.settled = self.settled, False
        try:
            yield
        finally:
            self.settled = before


@dataclasses.dataclass(eq=False)
class AlongAxis(Dataflow[Fact]):
    """Facts along one mapped axis: of several the greatest holds, if nothing else is said."""

    axis: str
    constant = 0

    def join(self, facts: Sequence[Any]) -> Any:
        return max(facts, default=self.constant)

    def varies(self, var: Any) -> bool:
        """Whether a value differs along the axis by its type."""
        return self.axis in _compat.varying_axes_of_type(var.aval)


def _hands_on(branches: Sequence[Jaxpr], k: int) -> bool:
    """Whether output `k` is one and the same operand in every branch."""
    places = {
        next((i for i, var in enumerate(branch.invars) if var is branch.outvars[k]), None)
        for branch in branches
    }
    return None not in places and len(places) == 1
