"""Which results of a traced program are the same on every replica, proven from the program.

A replica function of a strategy is traced without types that tell replicas apart: only then is
a gradient taken inside it the replica's own, a constant each replica's own copy, and a loop from
a constant accepted. What such types would show of its results is read off its equations. There the
derivatives of a reduced loss begin on each replica anew, and add up, which is read off as well.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._jaxpr.dataflow import AlongAxis
from jaxcoll._jaxpr.subjaxprs import RETYPING, equations, is_ref, names_axis, opened, programs
from jaxcoll._jaxpr.summed_again import divided
from jaxcoll._plan.packs.leaves import where

VARIES, REPEATED, TOO_LARGE = 1, 2, 4
"""Bits of what is found of a value: it may differ between the replicas; it comes from the backward
pass of a reduced loss, which begins on every replica; it was made of what is both in another way
than by its mean over the replicas, which alone is a derivative of the one loss that there is."""

_SUMMED = {"psum", "reduce_scatter"}
_SENT = {"ppermute", "all_to_all"}
_SAME_FOR_ANY_SCALE = {"sign", "is_finite"}
_PRODUCTS = {"mul", "div", "dot_general", "conv_general_dilated"}
_LINEAR = {"add", "add_any", "sub", "neg", "reduce_sum", "reduce_window_sum", "cumsum", "pad"}
_LINEAR |= {"scatter", "scatter-add", "scatter_add", "gather", "convert_element_type", "copy"}
_LINEAR |= {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "split"}
_LINEAR |= {"dynamic_slice", "dynamic_update_slice", "concatenate", "stack", "unstack", "rev"}
_LINEAR |= {"tile", "real", "imag", "complex", "conj", "reduce_precision"}
_LINEAR |= {"optimization_barrier", "as_stored", "needing", "select_n"}
_LINEAR |= {_compat.THROUGH, *RETYPING, *marks.ALL}
_LINEAR |= {*_SUMMED, *_SENT, "all_gather"}  # over other axes
_BEGIN_WITH_SUMS = {"psum", "reduce_scatter", marks.COTANGENT}
_EQUALIZING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_SAME = (marks.SAME, _compat.AS_INVARIANT)
_RETYPING = {*RETYPING, _compat.THROUGH, marks.PARTS}
_ZERO_STAYS = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"}
_ZERO_STAYS |= {"transpose", "neg", marks.ONCE, marks.GRADIENT}
_ASK_THE_HOST = ("callback", "infeed", "rng_uniform")

GRADIENT_OF_DIFFERENT = """\
`{caller}` over {axis!r}: {leaf} differs between replicas, or nothing shows that it does not, so \
reducing its gradient would mix those of different values. What to do: if it is the same \
everywhere, let it enter as one value for all replicas (an array or a `Mirrored`, no \
`PerReplica`, and not through `jax.lax.pcast`), or make it so with `jc.broadcast`; if it is meant \
to differ (an expert, a part of a sharded parameter, the batch), take its gradient with \
`jax.grad` of this replica's own loss, or run the step where JAX's types are on (a \
`jc.data_parallel` that need not do without them, a checked `jax.shard_map`): `jc.grad` keeps it \
on its replica there. A loss that puts a sharded parameter together (FSDP) and a step that \
returns it whole do so by `jc.all_gather`, which types can follow, not by `lax.all_gather`."""


_REDUCED_TWICE = """\
A reduction over {axis!r}: {leaf} is already the same on every replica, so reducing it again would \
count it once for each of them. What probably happened: it was reduced before, or is a constant. \
Reduce it no more; or say what it is: `invariant="replicated"` if every replica holds this value \
(SUM multiplies it by their number, MEAN leaves it)."""

_SAME_ROWS = """\
`scan_layers` over {axis!r}: {leaf} of `stacked` is the same on every replica, so gathering it \
would repeat it once for each of them. If every replica holds it whole (a bias, a norm), say so in \
`sharded`: False in its place, as in sharded={{"w": True, "b": False}}."""

_SHARDS_OF_REDUCED = """\
A loss that was reduced over {axis!r} is differentiated by `Shards` where types say nothing \
(checks=False, or types refuse the step): their gradient is the sum over all replicas, each of \
which holds that loss, and so as many times too large as there are replicas. Take `jc.grad` or \
`jc.value_and_grad` of this replica's own loss, which reduce it."""


def varying_outputs(
    jaxpr: ClosedJaxpr | Jaxpr, axis: str, varying: Sequence[bool], replicas: int
) -> list[int]:
    """What is found of each output of a traced program along `axis`, in bits; see `VARIES`.

    Law: no `VARIES` is a proof: the output is made of constants, of inputs that do not vary, and
    of reductions and gathers over the axis, by operations that give equal results for equal
    operands. `VARIES` proves nothing.

    Raises:
      ValueError: a gradient that is reduced over the axis is that of a leaf which may differ
        between replicas; the message names the caller and the leaf.
      AlreadyReducedError: what is reduced, or gathered as rows, is the same everywhere already.
    """
    in_shards = has(opened(jaxpr), marks.PARTS)
    flow = _Varying(axis, n=replicas, refuses=True, once=True, in_shards=in_shards)
    return flow.outputs(jaxpr, [*map(int, varying)])


def check_gradients(program: ClosedJaxpr, axes: Sequence[str]) -> None:
    """Refuse a program that reduces the gradient of something that differs between replicas.

    It has no inputs: the types of what it captures say along which of `axes` that varies.
    """
    if has(program.jaxpr, marks.GRADIENT) or has(program.jaxpr, marks.ROWS):
        for axis in axes:
            pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
            by_type = {var: int(axis in _compat.varying_axes(const)) for var, const in pairs}
            _Varying(axis, by_type, refuses=True).outputs(program, [])


def same_outputs(program: ClosedJaxpr, axes: Sequence[str]) -> list[frozenset[str]]:
    """Along which of `axes` each output is the same, even if all inputs and constants vary."""
    jaxpr = program.jaxpr
    captured = dict.fromkeys(jaxpr.constvars, VARIES)
    found = {axis: _Varying(axis, captured).outputs_of_all(jaxpr, VARIES) for axis in axes}
    return [
        frozenset(a for a in axes if not found[a][k] & VARIES) for k in range(len(jaxpr.outvars))
    ]


def has(program: Jaxpr, primitive: str) -> bool:
    """Whether a traced program has an equation of that name anywhere."""
    return any(eqn.primitive.name == primitive for eqn, _ in equations(program))


def mentions(program: Jaxpr, axes: Sequence[str]) -> bool:
    """Whether any equation of a traced program has to do with one of `axes`, but for marks."""
    return any(
        names_axis(eqn.params, axis)
        for eqn, _ in equations(program)
        if eqn.primitive.name not in (marks.GRADIENT, marks.ONCE, marks.ROWS)
        for axis in axes
    )


@dataclasses.dataclass(eq=False)
class _Varying(AlongAxis[int]):
    """What is found of each value, in bits; see `VARIES`."""

    held: Mapping[Any, int] = dataclasses.field(default_factory=dict)  # constants: what varies
    refuses: bool = False  # a marked gradient may be refused
    once: bool = False  # a marked reduction may be
    in_shards: bool = False  # a gradient in it is in shards, which is the sum over the replicas
    n: int = 1  # replicas

    def captured(self, var: Any) -> int:
        return self.held.get(var, 0)

    def join(self, facts: Sequence[int]) -> int:
        return functools.reduce(operator.or_, facts, 0)

    def chosen(self, by: int, fact: int) -> int:
        return by | fact | TOO_LARGE * is_own(by)

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        if names_axis(params, self.axis):
            if name == marks.GRADIENT:
                return ins[:1] if params["own"] else [self._gradient(eqn, *ins)]
            if name == marks.ONCE:
                return [self._reduced(eqn, ins[0], jaxpr)]
            if name == marks.ROWS:
                if self.refuses and self.settled and not ins[0] & VARIES:
                    leaf = where(eqn.params["path"])
                    raise AlreadyReducedError(_SAME_ROWS.format(leaf=leaf, axis=self.axis))
                return ins
            if name in _RETYPING or (name == _compat.AS_INVARIANT and not params["vouched"]):
                return ins
            whole = params.get("axis_index_groups") is None
            same = name in _SAME or (name in _EQUALIZING and whole)
            self._any_of(eqn, varies=True)
            repeated = self._repeated(eqn, ins, jaxpr)
            if name == marks.COTANGENT:
                return [ins[0] | repeated[0]]
            return [fact | VARIES * (not same) for fact in repeated]
        if any(word in name for word in _ASK_THE_HOST):
            return [VARIES | _computed(eqn, ins, 0)] * len(eqn.outvars)
        if any(map(is_ref, eqn.invars)):
            # Another holder of a `Ref` may write what varies to it at any time.
            if programs(eqn):
                both = zip(eqn.invars, ins, strict=True)
                self.inside(eqn, [fact | is_ref(x) for x, fact in both])
            return [VARIES] * len(eqn.outvars)
        outs = super().equation(eqn, ins, jaxpr)
        if self.backward or programs(eqn):
            return outs
        return [_computed(eqn, ins, fact) for fact in outs]

    def _repeated(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        """What the results are of cotangents that begin on every replica; without `VARIES`."""
        if not self.backward:
            return _exchanged(eqn, ins, jaxpr, self.n)
        name, fact = eqn.primitive.name, self.join(ins)
        found = fact & TOO_LARGE if name in _SAME else fact & (REPEATED | TOO_LARGE)
        # The end of our own gather of `Shards`, whose gradient is the sum of all losses'.
        ours = marks.is_our_reduction(eqn, "reduce_scatter")
        begins = name in _BEGIN_WITH_SUMS and not fact & VARIES and not ours
        if begins and not all(_is_zero(atom, jaxpr) for atom in eqn.invars):
            if self.in_shards and self.settled:
                raise ValueError(_SHARDS_OF_REDUCED.format(axis=self.axis))
            found |= REPEATED
        return [found] * len(eqn.outvars)

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        # In any order, with any operands, any number of times: the worst is taken.
        worst = self.join(ins) | self._any_of(eqn, varies=False) | self._fills_refs_by_place(eqn)
        worst |= TOO_LARGE * any(map(is_own, ins))
        if worst & VARIES:
            self._any_of(eqn, varies=True)
        return [worst] * len(eqn.outvars)

    def _any_of(self, eqn: JaxprEqn, *, varies: bool) -> int:
        """What is found of an equation's programs, if all or none of their inputs vary."""
        with self.unsettled():
            found = [self.outputs_of_all(body, int(varies)) for body in programs(eqn)]
        return self.join([*map(self.join, found)])

    def _fills_refs_by_place(self, eqn: JaxprEqn) -> bool:
        """Whether programs that return by `Ref`s, as kernels do, have to do with the axis."""
        return any(
            any(map(is_ref, body.invars)) and mentions(body, [self.axis]) for body in programs(eqn)
        )

    def _gradient(self, eqn: JaxprEqn, gradient: int, leaf: int) -> int:
        """A gradient that is going to be reduced; the leaf it belongs to must not vary."""
        if leaf & VARIES and self.refuses:
            place = where(eqn.params["path"])
            raise ValueError(GRADIENT_OF_DIFFERENT.format(leaf=place, **eqn.params))
        return gradient & ~REPEATED  # of the loss over all replicas

    def _reduced(self, eqn: JaxprEqn, fact: int, jaxpr: Jaxpr) -> int:
        """A value that is going to be reduced, which must vary."""
        # Zeros need not: they are the gradients of what a loss does not depend on.
        refuses = self.once and self.settled and not fact & VARIES
        if refuses and not _is_zero(eqn.invars[0], jaxpr):
            leaf = where(eqn.params["path"])
            raise AlreadyReducedError(_REDUCED_TWICE.format(leaf=leaf, axis=self.axis))
        if eqn.params["mean"]:
            return fact & ~REPEATED
        return fact | TOO_LARGE * is_own(fact)


def _is_zero(atom: Any, jaxpr: Jaxpr) -> bool:
    """Whether a value is nothing but zeros, as far as its own program shows."""
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while not isinstance(atom, Literal):
        eqn = made_by.get(atom)
        if eqn is None or eqn.primitive.name not in _ZERO_STAYS:
            return False
        atom = eqn.invars[0]
    return not np.any(np.asarray(atom.val))


def is_own(fact: int) -> bool:
    """Whether a value is a replica's own term of such a derivative."""
    return fact & VARIES != 0 and fact & REPEATED != 0


def is_wrong(fact: int) -> bool:
    """Whether a value is not what it would be if autodiff knew that there is one loss."""
    return is_own(fact) or fact & TOO_LARGE != 0


def _computed(eqn: JaxprEqn, ins: Sequence[int], found: int) -> int:
    """What an equation outside of a backward pass makes of it: `found`, if of linear terms."""
    own, name = [*map(is_own, ins)], eqn.primitive.name
    if not any(own):
        return found
    if name in _SAME_FOR_ANY_SCALE:
        return found & ~REPEATED
    product = name in _PRODUCTS and sum(own) == 1 and (name != "div" or own[0])
    linear = product or (name in _LINEAR and not (name == "select_n" and own[0]))
    return found if linear else found | TOO_LARGE


def _exchanged(eqn: JaxprEqn, ins: Sequence[int], jaxpr: Jaxpr, n: int) -> list[int]:
    """The same of an equation that has to do with an axis of `n` replicas; without `VARIES`."""
    name, outs = eqn.primitive.name, eqn.outvars
    if name in _SUMMED and len(ins) == len(outs):
        return [
            fact & TOO_LARGE | TOO_LARGE * (is_own(fact) and not divided(out, jaxpr, n))
            for fact, out in zip(ins, outs, strict=True)
        ]
    made = (REPEATED if name in _SENT else TOO_LARGE) * any(map(is_own, ins))
    return [made | TOO_LARGE * any(fact & TOO_LARGE for fact in ins)] * len(outs)
