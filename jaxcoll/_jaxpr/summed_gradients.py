"""Gradients that autodiff has summed over the replicas although each loss is a replica's own.

Under a checked `shard_map` the gradient of a parameter that is the same everywhere is a sum over
the replicas before anybody can ask for a mean. Where the loss was reduced first, that sum is the
derivative of the one loss there is. Where each replica differentiates a loss of its own, the
program looks like a `pmap` program and computes something else, without a word.

Where a backward pass begins shows the difference. That of a reduced loss begins with a number that
is the same everywhere, and the reduction's derivative then types it as varying; that of a local
loss begins with ones that vary already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.subjaxprs import equations, like, programs

_STILL_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape", "pvary", "pcast"}
_SCALED = {"mul", "div", "neg", "convert_element_type", "reshape", "broadcast_in_dim", "transpose"}
_SCALED |= {"squeeze", "expand_dims", "slice", "concatenate", "reduce_sum", "reduce_precision"}
_SCALED |= {"pvary", "pcast", "copy"}


@dataclasses.dataclass(frozen=True)
class Summed:
    """A gradient of local losses that autodiff has summed."""

    like: str  # its type, as in float32[3, 5]
    line: str  # of the user's Python where the parameter met what varies; "" if that is not known
    # The line of a reduction that takes it for a local one; None: there is none
    again: str | None = None


class _Known(NamedTuple):
    """What is known of a value."""

    # It comes, by values that vary, from the ones that `jax.grad` of a local loss begins with
    local: bool = False
    reduced: bool = False  # it comes, within a backward pass, from the cotangent of a reduced loss
    summed: JaxprEqn | None = None  # the equation that made it the sum of local gradients
    zero: bool = False  # it is nothing but zeros


def summed_gradients(program: Any, axis: str) -> tuple[Summed, ...]:
    """The gradients in a checked program that are sums of each replica's own over `axis`.

    Law: it finds those that anything outside of a backward pass uses or returns. What only travels
    within one, as the cotangent of statistics that all replicas share, is none.
    """
    reader = _Sums(axis)
    reader.take(reader.outputs_of_all(program, _Known()))
    return tuple(
        Summed(like(eqn.outvars[0].aval), _compat.users_line(eqn), reader.again.get(key))
        for key, eqn in reader.found.items()
    )


def crossing_sums(program: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` over which a backward pass sums, in a program without types."""
    found = {
        axis
        for eqn, backward in equations(program)
        if backward and eqn.primitive.name.startswith("psum")
        for axis in eqn.params["axes"]
    }
    return tuple(axis for axis in axes if axis in found)


@dataclasses.dataclass(eq=False)
class _Sums(AlongAxis[_Known]):
    constant = _Known()
    found: dict[int, JaxprEqn] = dataclasses.field(default_factory=dict)
    again: dict[int, str] = dataclasses.field(default_factory=dict)

    def literal(self, literal: Literal) -> _Known:
        return _Known(zero=not np.any(np.asarray(literal.val)))

    def take(self, used: Sequence[_Known]) -> None:
        """Note the sums among values that are used outside of a backward pass."""
        for eqn in (known.summed for known in used if known.summed is not None):
            self.found.setdefault(id(eqn), eqn)

    def join(self, facts: Sequence[_Known]) -> _Known:
        return _Known(
            local=any(known.local for known in facts),
            reduced=any(known.reduced for known in facts),
            summed=next((known.summed for known in facts if known.summed is not None), None),
            zero=bool(facts) and all(known.zero for known in facts),
        )

    def equation(self, eqn: JaxprEqn, ins: list[_Known], jaxpr: Jaxpr) -> list[_Known]:
        if programs(eqn):
            outs = self.inside(eqn, ins)
            is_choice = eqn.primitive.name == "cond"
            return outs if is_choice else [out._replace(zero=False) for out in outs]
        if self.settled and not self.backward:
            self.take(ins)
        return self._computed(eqn, ins)

    def opaque(self, eqn: JaxprEqn, ins: list[_Known]) -> list[_Known]:
        outs: list[_Known] = []
        for body in programs(eqn):
            fits = len(body.invars) == len(ins)
            given = ins if fits else [self.join(ins)] * len(body.invars)
            outs += self.outputs(body, given)
        return [self.join(outs)] * len(eqn.outvars)

    def _computed(self, eqn: JaxprEqn, ins: list[_Known]) -> list[_Known]:
        name, within = eqn.primitive.name, self.backward
        changes = len(eqn.invars) == len(eqn.outvars) and any(
            self.varies(a) != self.varies(b) for a, b in zip(eqn.invars, eqn.outvars, strict=True)
        )
        if changes and name.startswith("psum"):
            return [self._summed(eqn, known) for known in ins]
        if changes and name in ("pvary", "pcast"):
            return [self._typed(eqn, known) for known in ins]
        added = name in ("add", "add_any") and all(known.summed or known.zero for known in ins)
        met = self.join(ins)
        return [
            _Known(
                local=met.local and self.varies(out),
                reduced=within and met.reduced,
                summed=met.summed
                if (within or added or name in _SCALED) and not self.varies(out)
                else None,
                zero=name in _STILL_ZERO and all(known.zero for known in ins),
            )
            for out in eqn.outvars
        ]

    def _summed(self, eqn: JaxprEqn, known: _Known) -> _Known:
        """What comes out of a sum over the axis: autodiff's, if it stands in a backward pass."""
        if not self.backward:
            if known.summed is not None:
                self.again[id(known.summed)] = _compat.users_line(eqn)
            return _Known()
        # `jc.sync_in_backward` reduces there, too, and knows what it sums.
        own = marks.is_our_reduction(eqn)
        if known.zero or own or (known.reduced and not known.local):
            return _Known(reduced=known.reduced, zero=known.zero)
        return _Known(summed=eqn)

    def _typed(self, eqn: JaxprEqn, known: _Known) -> _Known:
        """What varies from here on, by its type alone."""
        begins = self.backward and not (known.zero or known.summed or marks.is_made_again(eqn))
        begins = begins and marks.is_transposed_reduction(eqn)
        return _Known(
            local=marks.is_seed_of_gradient(eqn),
            reduced=known.reduced or begins,
            summed=None if self.backward else known.summed,
            zero=known.zero,
        )
