"""Prove which values of a traced step are the same on every replica.

The proof is one forward pass over the equations of one replica's program. The fact about a value
is an integer with a few bits for each mapped axis:

- VARIES: it may differ between the replicas along the axis;
- REDUCED: it comes from a reduction over the axis;
- PART: it is this replica's shard of a reduced sum, such as a gradient in `Shards`;
- MOVED: it is a shard that was only moved, cast or scaled since the reduction;
- LOCAL: it is a number computed from one shard alone, such as its norm.

A value varies if an operand varies, unless its equation sums, compares or gathers over the whole
axis. The results of unknown equations vary. Bits are only added, so that loops reach a fixed point,
a program is read once for the same facts of its inputs, and a refusal stays one. The pass refuses

- a collective over an axis inside a branch or loop whose condition varies along it;
- gradients that will be reduced, with respect to leaves that differ between replicas;
- shards that are summed again, or are scaled or selected by a number of one shard alone;

and it finds repeated sums: of values that a reduction has already made the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxcoll._compat import eqns, marks
from jaxcoll._gradients.proof import primitives, refusals
from jaxcoll._gradients.proof.dataflow import Dataflow, union
from jaxcoll._gradients.proof.repeated_sums import RepeatedSum, is_divided
from jaxcoll._gradients.proof.subjaxprs import equations, is_ref, open_jaxpr, programs, show_line
from jaxcoll._gradients.proof.walk import find_line, find_nested_line
from jaxcoll._plan.checks import describe_type

# A set of axes is an integer with the lowest of each axis's five bits, as in `_Proof.bit`. So
# `axes * m` has the bits `m` of these axes, and `fact // m & axes` is the axes along which `fact`
# has the bit `m`.
_VARIES, _REDUCED, _PART, _MOVED, _LOCAL = (1 << k for k in range(5))
_BITS = 5
_DIFFERS = _VARIES | _PART | _MOVED | _LOCAL  # the bits that a value loses when it becomes equal


@dataclasses.dataclass(frozen=True)
class Proven:
    """The results of `prove`."""

    varying: list[frozenset[str]]  # for each output, the axes along which it may differ
    repeated: tuple[RepeatedSum, ...]
    jaxpr: Jaxpr

    def gradient_line(self, k: int) -> str:
        """Find the user's line that took a gradient that output `k` depends on; "" if none."""
        return find_nested_line(self.jaxpr, self.jaxpr.outvars[k], eqns.line_of_gradient)

    def callback_line(self, k: int) -> str:
        """Find the user's line of a host callback that output `k` depends on; "" if none."""

        def line(eqn: JaxprEqn) -> str:
            return eqns.users_line(eqn) if "callback" in eqn.primitive.name else ""

        return find_nested_line(self.jaxpr, self.jaxpr.outvars[k], line)

    def line(self, k: int) -> str:
        """Find the user's line that computed output `k`; "" if it is not known."""
        return find_line(self.jaxpr, self.jaxpr.outvars[k])


def prove(
    program: Any,
    inputs: Sequence[frozenset[str]],
    axes: Mapping[str, int],
    *,
    narrow_sums_abort: bool = False,
) -> Proven:
    """Prove along which axes the outputs of one replica's traced program vary.

    Args:
      program: its jaxpr.
      inputs: for each input, the axes along which it varies.
      axes: the mapped axes to consider, with their sizes.
      narrow_sums_abort: refuse reductions of bfloat16 over them.

    Raises:
      ValueError: a collective would hang or mix unrelated values; see the module's docstring.
    """
    proof = _Proof(axes, narrow_sums_abort=narrow_sums_abort)
    jaxpr = open_jaxpr(program)
    facts = [sum(bit for axis, bit in proof.bit.items() if axis in along) for along in inputs]
    facts = proof.find_fixpoint(jaxpr, facts)
    # An empty array cannot differ.
    facts = [
        fact if getattr(x.aval, "size", 1) else 0
        for fact, x in zip(facts, jaxpr.outvars, strict=True)
    ]
    varying = [frozenset(a for a, bit in proof.bit.items() if fact & bit) for fact in facts]
    return Proven(varying, tuple(proof.find_repeated()), jaxpr)


def same_outputs(program: Any, axes: Mapping[str, int]) -> list[frozenset[str]]:
    """Find the axes along which each output of a program is the same for any inputs."""
    jaxpr = open_jaxpr(program)
    proof = _Proof(axes, refuses=False, varying={*jaxpr.constvars})
    facts = proof.find_fixpoint(jaxpr, [proof.all] * len(jaxpr.invars))
    return [frozenset(a for a, bit in proof.bit.items() if not fact & bit) for fact in facts]


class _Proof(Dataflow):
    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        narrow_sums_abort: bool = False,
        refuses: bool = True,
        varying: Set[Any] = frozenset(),  # constants of the program that vary
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.bit = {axis: 1 << _BITS * k for k, axis in enumerate(sizes)}
        self.all = sum(self.bit.values())
        # Along an axis of size 1, no replica waits for others, and nothing is summed twice
        self._checked = sum(bit for axis, bit in self.bit.items() if sizes[axis] > 1 and refuses)
        self._varying = varying
        self._narrow_sums_abort = narrow_sums_abort
        self._sums: dict[int, tuple[JaxprEqn, Jaxpr, list[int]]] = {}
        # By the id of the equation that makes a reference: its number, as a bit above the axes' in
        # the fact of the reference; and the fact of all that it ever holds
        self._refs: dict[int, tuple[int, int]] = {}
        self._first_ref = 1 << _BITS * len(sizes)
        self._functions: dict[int, bool] = {}  # by the id of an equation
        self._around: list[JaxprEqn] = []  # the equations whose programs are being read

    def find_fixpoint(self, jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
        """Read a program until the facts of mutable references do not change."""
        while True:
            before = dict(self._refs)
            facts = self.outputs(jaxpr, inputs)
            if self._refs == before:
                return facts
            self.forget()

    def constant(self, var: Any) -> int:
        return self.all if var in self._varying else 0

    def select(self, by: int, fact: int, eqn: JaxprEqn) -> int:
        self._check_local(by | fact, eqn)
        return by | fact

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in marks.ALL:
            return self._mark(eqn, ins, jaxpr)
        if name in primitives.FIRST:
            return ins[:1]
        if name in primitives.SAME_PLACE:
            return ins
        if name not in primitives.PLAIN:
            if programs(eqn):
                self._around.append(eqn)
                results = self.read_programs(eqn, ins)
                self._around.pop()
                return results
            if named := self._axes_in(eqn.params):
                return self._exchange(eqn, ins, named, jaxpr)
            if name == "new_ref":
                # A reference has a bit, which its copies carry; what is written through any of them
                # is noted at this bit.
                ref, held = self._refs.get(id(eqn), (self._first_ref << len(self._refs), 0))
                self._refs[id(eqn)] = ref, held | union(ins)
                return [ref]
            if name in primitives.OF_REFS:
                return self._use_ref(eqn, *ins)
            if not self._is_function(eqn):
                return self._unknown(ins) * count
        fact = union(ins)
        return [self._combine(eqn, fact) if fact & self.all * (_PART | _LOCAL) else fact] * count

    def _use_ref(self, eqn: JaxprEqn, ref: int, *others: int) -> list[int]:
        """Find the facts of the results of an equation that reads or changes a reference."""
        if eqn.primitive.name not in ("get", "freeze"):
            self._write(ref, union(others))
        held = [held for bit, held in self._refs.values() if ref & bit] or [self.all]
        return [union([*held, *others])] * len(eqn.outvars)

    def _write(self, refs: int, fact: int) -> None:
        for key, (bit, held) in self._refs.items():
            if refs & bit:
                self._refs[key] = bit, held | fact

    def _unknown(self, ins: Sequence[int]) -> list[int]:
        """Find the fact of the result of an unknown equation, which may change references."""
        self._write(union(ins), self.all)
        return [union(ins) % self._first_ref | self.all]

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        bodies = programs(eqn)
        if eqn.primitive.name in primitives.CALLS and len(bodies[0].invars) == len(ins):
            return self.outputs(bodies[0], ins)
        # The order of the programs and their operands are unknown. The results are the same where
        # all operands are, if every equation is a function.
        on_refs = set() if any(map(is_ref, eqn.invars)) else primitives.ON_REFS
        nested = (e for body in bodies for e in equations(body))
        known = all(e.primitive.name in on_refs or self._is_function(e) for e in nested)
        return ([union(ins)] if known else self._unknown(ins)) * len(eqn.outvars)

    def _axes_in(self, params: Mapping[str, Any]) -> int:
        """Collect the axes that an equation's parameters name, as bits."""
        bits = 0
        for key, p in params.items():
            if isinstance(p, str):
                bits |= self.bit.get(p, 0) if key != "name" else 0  # of a jitted function
            elif isinstance(p, tuple | list | frozenset | set):
                for x in p:
                    if isinstance(x, str):
                        bits |= self.bit.get(x, 0)
        return bits

    def _is_function(self, eqn: JaxprEqn) -> bool:
        """True if the results depend on the operands alone, and not on the replica."""
        name = eqn.primitive.name
        if (
            any(word in name for word in primitives.FROM_ELSEWHERE)
            # Named axes, which are effects, too, are found by the parameters below.
            or any("NamedAxis" not in type(e).__name__ for e in eqn.effects)
            or any(map(is_ref, eqn.invars))
            or self._axes_in(eqn.params)
        ):
            return False
        if name in primitives.FUNCTIONS or name in primitives.SILENT or programs(eqn):
            return True
        if id(eqn) not in self._functions:
            self._functions[id(eqn)] = eqns.is_lowered_to_functions(eqn)
        return self._functions[id(eqn)]

    def _mark(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        named = self._axes_in(params)
        if name == marks.PARTS:
            return [ins[0] | named * (_VARIES | _PART | _MOVED)]
        if name == marks.CHECKED:
            if params["needs"] == "summands":
                self._note_sums(eqn, ins[1:], jaxpr)
            else:
                self._check_leaves(ins[1:], named, **params)
            return ins[:1]
        count = len(eqn.outvars)
        results, before = ins[:count], ins[count:]
        if params["sums"]:
            self._note_sums(eqn, before, jaxpr)
        results = [fact & ~(named * _DIFFERS) for fact in results]
        if before:
            # The result comes from a reduction where the summand varied, or came from one itself.
            reduced = [(fact // _VARIES | fact // _REDUCED) & named for fact in before]
            results = [
                fact & ~(named * _REDUCED) | more * _REDUCED
                for fact, more in zip(results, reduced, strict=True)
            ]
        return results

    def _check_leaves(
        self, facts: Sequence[int], named: int, leaves: Any, caller: str, needs: str, **_: Any
    ) -> None:
        """Refuse leaves that differ but must not, or that are the same but should be rows."""
        rows = needs == "rows"
        for leaf, fact in zip(leaves, facts, strict=True):
            if wrong := named & self._checked & (~fact if rows else fact):
                fields = {"leaf": leaf, "axis": self._axis(wrong), "caller": caller}
                raise ValueError((refusals.WHOLE if rows else refusals.DIFFERENT).format(**fields))

    def _exchange(self, eqn: JaxprEqn, ins: list[int], named: int, jaxpr: Jaxpr) -> list[int]:
        """Find the facts of the results of a collective."""
        name, params = eqn.primitive.name, eqn.params
        if self._narrow_sums_abort and name in primitives.ABORTING:
            self._check_width(eqn, named)
        clear = ~(named * _DIFFERS)
        whole = params.get("axis_index_groups") is None
        if name in primitives.EQUALIZING and whole and len(ins) == len(eqn.outvars):
            gathers = name.startswith("all_gather")
            if not gathers:
                self._check_parts(eqn, ins, named)
            if name in primitives.SUMS and not eqns.is_our_reduction(eqn):
                self._note_sums(eqn, ins, jaxpr)
            # A sum of what was the same before is no reduction: it may be a count.
            sums = 0 if gathers else named
            return [(fact | (fact & sums) * _REDUCED) & clear for fact in ins]
        reduced = named * _REDUCED if name == "reduce_scatter" else 0
        if reduced and whole and not eqns.is_our_reduction(eqn):
            self._note_sums(eqn, ins, jaxpr)
        # All others give each replica something of its own: a part of a sum, another's array.
        return [union(ins) & clear | named | reduced] * len(eqn.outvars)

    def _note_sums(self, eqn: JaxprEqn, ins: Sequence[int], jaxpr: Jaxpr) -> None:
        seen = self._sums.setdefault(id(eqn), (eqn, jaxpr, [0] * len(ins)))[2]
        seen[:] = [a | b for a, b in zip(seen, ins, strict=True)]

    def _check_width(self, eqn: JaxprEqn, named: int) -> None:
        for x in eqn.invars:
            if getattr(x.aval, "dtype", None) == "bfloat16":
                at = show_line(eqns.users_line(eqn))
                fields = {"name": eqn.primitive.name, "axis": self._axis(named), "at": at}
                raise ValueError(refusals.NARROW.format(like=describe_type(x.aval), **fields))

    def _check_parts(self, eqn: JaxprEqn, ins: Sequence[int], named: int) -> None:
        for x, fact in zip(eqn.invars, ins, strict=True):
            if moved := fact // _MOVED & named & self._checked:
                axis = self._axis(moved)
                at = show_line(eqns.users_line(eqn))
                like = describe_type(x.aval)
                raise ValueError(refusals.PARTS_SUMMED.format(axis=axis, at=at, like=like))

    def _combine(self, eqn: JaxprEqn, fact: int) -> int:
        """Find the fact of a function of shards, or of numbers that come from one shard."""
        self._check_local(fact, eqn)
        name = eqn.primitive.name
        if name in primitives.MIXING or not any(getattr(x.aval, "shape", ()) for x in eqn.outvars):
            # Of a part's rows, one number is left, which is this replica's alone.
            local = fact // _PART & self.all
            return fact & ~(self.all * (_PART | _MOVED)) | local * _LOCAL
        return fact if name in primitives.MOVES else fact & ~(self.all * _MOVED)

    def _check_local(self, fact: int, eqn: JaxprEqn) -> None:
        """Refuse a combination of a shard with a number that comes from one shard."""
        if both := fact // _PART & fact // _LOCAL & self._checked:
            at = show_line(eqns.users_line(eqn))
            raise ValueError(refusals.LOCAL_NORM.format(axis=self._axis(both), at=at))

    def check_choice(
        self, by: int, bodies: Sequence[Any], eqn: JaxprEqn, ins: Sequence[int]
    ) -> None:
        """Refuse a collective over an axis along which the condition `by` varies."""
        self._write(union(ins), by)  # only some replicas may change a reference there
        if not by & self._checked:
            return
        where, line = "branch", eqns.users_line(eqn)
        if eqn.primitive.name == "while":
            condition = open_jaxpr(bodies[-1])
            where, line = "loop", find_line(condition, condition.outvars[0])
        nested = [e for body in bodies for e in equations(body)]
        for inner in nested:
            name = inner.primitive.name
            if name in primitives.SILENT or programs(inner):
                continue
            if named := self._axes_in(inner.params) & by & self._checked:
                fields = {"axis": self._axis(named), "where": where}
                fields["advice"] = self._advise(nested).format(**fields)
                fields |= {"at": show_line(eqns.users_line(inner)), "line": show_line(line)}
                raise ValueError(refusals.CHOSEN.format(kind=f"`{name}`", **fields))

    def _advise(self, nested: Sequence[JaxprEqn]) -> str:
        """Choose the way out of a branch or loop with these equations."""
        if any(map(eqns.is_backward, self._around)):
            return refusals.SOLVER
        gradient = next(filter(None, map(eqns.line_of_gradient, nested)), "")
        if not gradient and not any(map(eqns.is_backward, nested)):
            return refusals.MOVE_OUT
        return refusals.MOVE_OUT + refusals.OWN_GRADIENT.replace("{gradient}", show_line(gradient))

    def _axis(self, bits: int) -> str:
        return next(axis for axis, bit in self.bit.items() if bits & bit)

    def find_repeated(self) -> Iterator[RepeatedSum]:
        """Yield the sums of values that a reduction has already made the same along their axis."""
        for eqn, jaxpr, facts in self._sums.values():
            again = self._axes_in(eqn.params) & self._checked
            atoms = eqn.invars[-len(facts) :]  # jaxcoll's marks have the reduced values last
            outs = eqn.outvars if len(eqn.outvars) == len(facts) else eqn.outvars * len(facts)
            for fact, atom, out in zip(facts, atoms, outs, strict=True):
                # Along an axis of this sum, a reduction was there before, and nothing differs
                # since.
                bits = again & ~fact & fact // _REDUCED
                if not bits or eqns.is_backward(eqn):
                    continue
                axis = self._axis(bits)
                if not is_divided(out, jaxpr, self.sizes[axis]):
                    maker = find_line(jaxpr, atom, {*primitives.EQUALIZING, marks.SAME})
                    like, line = describe_type(atom.aval), eqns.users_line(eqn)
                    yield RepeatedSum(axis, like, line, maker)
