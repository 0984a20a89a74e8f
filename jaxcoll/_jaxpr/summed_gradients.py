"""Gradients that autodiff has summed over the replicas although each loss is a replica's own.

Under a checked `shard_map` the gradient of a parameter that is the same everywhere is a sum over
the replicas before anybody can ask for a mean. Where the loss was reduced first, that sum is the
derivative of the one loss there is. Where each replica differentiates a loss of its own, the
program looks like a `pmap` program and computes something else, without a word.

The two are told apart by where a backward pass begins. That of a reduced loss begins with a number
that is the same everywhere, and the reduction's derivative then types it as varying; that of a
local loss begins with ones that vary already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.replication import scan_parts
from jaxcoll._jaxpr.subjaxprs import opened, programs

_STILL_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape", "pvary", "pcast"}
_SCALED = {"mul", "div", "neg", "convert_element_type", "reshape", "broadcast_in_dim", "transpose"}
_SCALED |= {"squeeze", "expand_dims", "slice", "concatenate", "reduce_sum", "reduce_precision"}
_SCALED |= {"pvary", "pcast", "copy"}


@dataclasses.dataclass(frozen=True)
class Summed:
    """A gradient of local losses that autodiff has summed.

    Attributes:
      like: its type, as in float32[3, 5].
      line: of the user's Python where the parameter met what varies; "" if that is not known.
      again: the line of a reduction that takes it for a local one; None: there is none.
    """

    like: str
    line: str
    again: str | None = None


class _Known(NamedTuple):
    """What is known of a value.

    Attributes:
      local: it comes, by values that vary, from the ones that `jax.grad` of a local loss begins
        with.
      whole: it comes, within a backward pass, from the cotangent of a reduced loss.
      summed: the equation that made it the sum of local gradients.
      zero: it is nothing but zeros.
    """

    local: bool = False
    whole: bool = False
    summed: JaxprEqn | None = None
    zero: bool = False


def summed_gradients(program: Any, axis: str) -> tuple[Summed, ...]:
    """The gradients in a checked program that are sums of each replica's own over `axis`.

    Law: it finds those that anything outside of a backward pass uses or returns. What only travels
    within one, as the cotangent of statistics that all replicas share, is none.

    Args:
      program: of one replica, with types that tell replicas apart along `axis`.
      axis: a mapped axis.

    Returns:
      Each once.
    """
    reader = _Reader(axis)
    jaxpr = opened(program)
    outs = reader.read(jaxpr, [_Known()] * len(jaxpr.invars), backward=False)
    reader.take(outs)
    return tuple(
        dataclasses.replace(found, again=reader.again.get(key))
        for key, found in reader.found.items()
    )


class _Reader:
    def __init__(self, axis: str) -> None:
        self._axis = axis
        self.found: dict[int, Summed] = {}
        self.again: dict[int, str] = {}

    def take(self, used: Sequence[_Known]) -> None:
        """Note the sums among values that are used outside of a backward pass."""
        for eqn in (known.summed for known in used):
            if eqn is not None and id(eqn) not in self.found:
                aval: Any = eqn.outvars[0].aval
                like = f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"
                self.found[id(eqn)] = Summed(like, _compat.users_line(eqn))

    def read(self, jaxpr: Jaxpr, inputs: Sequence[_Known], backward: bool) -> list[_Known]:
        known: dict[Any, _Known] = dict.fromkeys(jaxpr.constvars, _Known())
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> _Known:
            if isinstance(atom, Literal):
                return _Known(zero=not np.any(np.asarray(atom.val)))
            return known[atom]

        for eqn in jaxpr.eqns:
            ins = [*map(of, eqn.invars)]
            stack = str(eqn.source_info.name_stack)
            within = backward or "transpose" in stack
            bodies = [*programs(eqn.params)]
            if not within and not bodies:
                self.take(ins)
            outs = (
                self._inside(eqn, bodies, ins, within)
                if bodies
                else self._equation(eqn, ins, within, stack)
            )
            known.update(zip(eqn.outvars, outs, strict=True))
        return [*map(of, jaxpr.outvars)]

    def _varies(self, var: Any) -> bool:
        return self._axis in _compat.varying_axes_of_type(var.aval)

    def _equation(self, eqn: JaxprEqn, ins: list[_Known], within: bool, stack: str) -> list[_Known]:
        name, pairs = eqn.primitive.name, [*zip(eqn.invars, ins, eqn.outvars, strict=False)]
        changes = len(eqn.invars) == len(eqn.outvars) and any(
            self._varies(a) != self._varies(out) for a, _, out in pairs
        )
        if changes and name.startswith("psum"):
            return [self._summed(eqn, known, within, stack) for _, known, _ in pairs]
        if changes and name in ("pvary", "pcast"):
            return [self._typed(eqn, known, within, stack) for _, known, _ in pairs]
        summed = next((known.summed for known in ins if known.summed), None)
        kept = (
            within
            or name in _SCALED
            or (name in ("add", "add_any") and all(known.summed or known.zero for known in ins))
        )
        return [
            _Known(
                local=any(known.local for known in ins) and self._varies(out),
                whole=within and any(known.whole for known in ins),
                summed=summed if kept and not self._varies(out) else None,
                zero=name in _STILL_ZERO and all(known.zero for known in ins),
            )
            for out in eqn.outvars
        ]

    def _summed(self, eqn: JaxprEqn, known: _Known, within: bool, stack: str) -> _Known:
        """What comes out of a sum over the axis: autodiff's, if it stands in a backward pass."""
        if not within:
            if known.summed is not None:
                self.again[id(known.summed)] = _compat.users_line(eqn)
            return _Known()
        own = "all_reduce_" in stack  # `jc.sync_in_backward`, which knows what it sums
        if known.zero or own or (known.whole and not known.local):
            return _Known(whole=known.whole, zero=known.zero)
        return _Known(summed=eqn)

    def _typed(self, eqn: JaxprEqn, known: _Known, within: bool, stack: str) -> _Known:
        """What varies from here on, by its type alone."""
        begins = within and not (known.zero or known.summed or "rematted" in stack)
        return _Known(
            local=marks.is_seed_of_gradient(eqn),
            whole=known.whole or begins,
            summed=None if within else known.summed,
            zero=known.zero,
        )

    def _inside(
        self, eqn: JaxprEqn, bodies: list[Jaxpr], ins: list[_Known], within: bool
    ) -> list[_Known]:
        """What the programs within an equation make of its operands."""
        name = eqn.primitive.name
        if name == "scan":
            first, carried = scan_parts(eqn)
            return self._loop(opened(eqn.params["jaxpr"]), ins, first, carried, within)
        if name == "while":
            skipped = eqn.params["cond_nconsts"]
            first = eqn.params["body_nconsts"]
            body, rest = opened(eqn.params["body_jaxpr"]), ins[skipped:]
            return self._loop(body, rest, first, len(rest) - first, within)
        operands = ins[1:] if name == "cond" else ins
        outs = [_Known()] * len(eqn.outvars)
        for body in bodies:
            fits = len(body.invars) == len(operands)
            given = operands if fits else [_either(operands)] * len(body.invars)
            made = self.read(body, given, within)
            if len(made) != len(outs):
                made = [_either(made)] * len(outs)
            outs = [_either(pair) for pair in zip(outs, made, strict=True)]
        if len(bodies) == 1:
            outs = [out._replace(zero=False) for out in outs]
        return outs

    def _loop(
        self, body: Jaxpr, ins: list[_Known], first: int, carried: int, within: bool
    ) -> list[_Known]:
        while True:
            outs = self.read(body, ins, within)
            carry = [
                _either(pair)
                for pair in zip(ins[first : first + carried], outs[:carried], strict=True)
            ]
            if carry == ins[first : first + carried]:
                return [out._replace(zero=False) for out in outs]
            ins = [*ins[:first], *carry, *ins[first + carried :]]


def _either(several: Sequence[_Known]) -> _Known:
    """What is known of a value that is one of several."""
    return _Known(
        local=any(known.local for known in several),
        whole=any(known.whole for known in several),
        summed=next((known.summed for known in several if known.summed is not None), None),
        zero=bool(several) and all(known.zero for known in several),
    )


def crossing_sums(program: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` over which a backward pass sums, in a program without types."""
    found = {axis for axis in axes if _sums_backward(opened(program), axis, backward=False)}
    return tuple(axis for axis in axes if axis in found)


def _sums_backward(jaxpr: Jaxpr, axis: str, backward: bool) -> bool:
    for eqn in jaxpr.eqns:
        within = backward or "transpose" in str(eqn.source_info.name_stack)
        axes = eqn.params.get("axes", ())
        if within and eqn.primitive.name.startswith("psum") and axis in axes:
            return True
        if any(_sums_backward(body, axis, within) for body in programs(eqn.params)):
            return True
    return False
