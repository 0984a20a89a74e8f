"""Which results of a traced program are the same on every replica, proven from the program.

A replica function of a strategy is traced without types that tell replicas apart: only then is
a gradient taken inside it the replica's own, a constant each replica's own copy, and a loop from
a constant accepted. What such types would have said of its results is read off its equations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._jaxpr.subjaxprs import CALLS, opened, programs
from jaxcoll._plan.packs.leaves import where

_EQUALIZING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_RETYPING = {"pvary", "pcast", _compat.THROUGH}
_ZERO_STAYS = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"}
_ZERO_STAYS |= {"transpose", "neg", marks.ONCE, marks.GRADIENT}
_ASK_THE_HOST = ("callback", "infeed", "rng_uniform")

_GRADIENT_OF_DIFFERENT = """\
`{caller}` over {axis!r}: {leaf} differs between replicas, or nothing shows that it does not, so \
reducing its gradient would mix those of different values. What to do: if it is the same \
everywhere, let it enter as one value for all replicas (an array or a `Mirrored`, no \
`PerReplica`, and not through `jax.lax.pcast`), or make it so with `jc.broadcast`; if it is meant \
to differ (an expert, a part of a sharded parameter, the batch), take its gradient with \
`jax.grad` of this replica's own loss, or run the step in a `jax.shard_map` with its checks on, \
where `jc.grad` keeps it on its replica."""


_REDUCED_TWICE = """\
A reduction over {axis!r}: {leaf} is already the same on every replica, so reducing it again would \
count it once for each of them. What probably happened: it was reduced before, or is a constant. \
Reduce it no more; or say what it is: `invariant="replicated"` if every replica holds this value \
(SUM multiplies it by their number, MEAN leaves it)."""


@dataclasses.dataclass(frozen=True)
class _Along:
    """What is asked of a program.

    Attributes:
      axis: along which axis.
      refuses: whether a marked gradient may be refused.
      once: whether a marked reduction may be.
      settled: whether what is known to be the same is known for good, in a loop as well.
    """

    axis: str
    refuses: bool
    once: bool = False
    settled: bool = True


def varying_outputs(jaxpr: ClosedJaxpr | Jaxpr, axis: str, varying: Sequence[bool]) -> list[bool]:
    """Whether each output of a traced program may differ between the replicas along `axis`.

    Law: False is a proof: the output is made of constants, of inputs that do not vary, and of
    reductions and gathers over the axis, by operations that give equal results for equal
    operands. True is no proof of anything.

    Args:
      jaxpr: the program of one replica.
      axis: the mapped axis.
      varying: whether each input differs between replicas.

    Returns:
      One answer for each output.

    Raises:
      ValueError: a gradient that is reduced over the axis is that of a leaf which may differ
        between replicas; the message names the caller and the leaf.
      AlreadyReducedError: what is reduced over the axis is the same on all replicas already.
    """
    program = opened(jaxpr)
    along = _Along(axis, refuses=True, once=True)
    return _outputs(program, along, [False] * len(program.constvars), list(varying))


def check_gradients(program: ClosedJaxpr, axes: Sequence[str]) -> None:
    """Refuse a program that reduces the gradient of something that differs between replicas.

    Args:
      program: without inputs, made from captured values whose own types say along which axes they
        vary.
      axes: axes that types tell replicas apart on.

    Raises:
      ValueError: as in `varying_outputs`.
    """
    if has(program.jaxpr, marks.GRADIENT):
        for axis in axes:
            varying = [axis in _compat.varying_axes(const) for const in program.consts]
            _outputs(program.jaxpr, _Along(axis, refuses=True), varying, [])


def same_outputs(program: ClosedJaxpr, axes: Sequence[str]) -> list[frozenset[str]]:
    """Along which of `axes` each output is the same, whatever the program was made from.

    Law: as in `varying_outputs`, with inputs and captured values that all vary.
    """
    jaxpr = program.jaxpr
    varying = {
        axis: _outputs(
            jaxpr,
            _Along(axis, refuses=False),
            [True] * len(jaxpr.constvars),
            [True] * len(jaxpr.invars),
        )
        for axis in axes
    }
    return [
        frozenset(axis for axis in axes if not varying[axis][k]) for k in range(len(jaxpr.outvars))
    ]


def has(program: Jaxpr, primitive: str) -> bool:
    """Whether a traced program has an equation of that name anywhere."""
    return any(
        eqn.primitive.name == primitive
        or any(has(inner, primitive) for inner in programs(eqn.params))
        for eqn in program.eqns
    )


def mentions(program: Jaxpr, axes: Sequence[str]) -> bool:
    """Whether any equation of a traced program has to do with one of `axes`."""
    return any(
        # A mark sends nothing.
        (
            eqn.primitive.name not in (marks.GRADIENT, marks.ONCE)
            and any(_says(eqn.params, axis) for axis in axes)
        )
        or any(mentions(inner, axes) for inner in programs(eqn.params))
        for eqn in program.eqns
    )


def _outputs(
    jaxpr: Jaxpr, along: _Along, consts: Sequence[bool], inputs: Sequence[bool]
) -> list[bool]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def varies(atom: Any) -> bool:
        return not isinstance(atom, Literal) and known[atom]

    made_by: dict[Any, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        inputs = [*map(varies, eqn.invars)]
        if eqn.primitive.name == marks.ONCE and eqn.params["axis"] == along.axis:
            outs = [_reduced(eqn, along, inputs[0], _is_zero(eqn.invars[0], made_by))]
        else:
            outs = _equation(eqn, along, inputs)
        known.update(zip(eqn.outvars, outs, strict=True))
        made_by.update(dict.fromkeys(eqn.outvars, eqn))
    return [varies(atom) for atom in jaxpr.outvars]


def _equation(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    """Whether each result of one equation varies."""
    name, params = eqn.primitive.name, eqn.params
    if _says(params, along.axis):
        if name == marks.GRADIENT:
            return [_gradient(eqn, along, *inputs)]
        if name in _RETYPING or (name == _compat.AS_INVARIANT and not params["vouched"]):
            return inputs
        same = name in (_compat.SAME, _compat.AS_INVARIANT) or (
            name in _EQUALIZING and params.get("axis_index_groups") is None
        )
        _makes_different(eqn, along, varies=True)
        return [not same] * len(eqn.outvars)
    if _asks_the_host(name):
        return [True] * len(eqn.outvars)
    if any(map(_is_ref, eqn.invars)):
        # Whoever holds a `Ref` may write what varies to it, whenever that is.
        inputs = [varies or _is_ref(x) for x, varies in zip(eqn.invars, inputs, strict=True)]
        if any(programs(params)):
            _RULES.get(name, _call)(eqn, along, inputs)
        return [True] * len(eqn.outvars)
    if not any(programs(params)):
        return [any(inputs)] * len(eqn.outvars)
    return _RULES.get(name, _call)(eqn, along, inputs)


def _is_ref(atom: Any) -> bool:
    return hasattr(atom.aval, "inner_aval")


def _asks_the_host(name: str) -> bool:
    return any(word in name for word in _ASK_THE_HOST)


def _says(params: dict[str, Any], axis: str) -> bool:
    """Whether a parameter of an equation is the axis, or a collection with the axis in it."""
    return any(
        p == axis if isinstance(p, str) else isinstance(p, tuple | list | frozenset) and axis in p
        for key, p in params.items()
        if key != "name"  # a jitted function's own name is no axis
    )


def _call(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    """A call of one program with the equation's own operands; of anything else the worst."""
    body, *others = programs(eqn.params)
    if eqn.primitive.name in CALLS and not others and len(body.invars) == len(inputs):
        return _body(body, along, inputs)
    # In whatever order it runs them, whatever it gives them, and however often.
    worst = any(inputs) or _makes_different(eqn, along, varies=False)
    if worst:
        _makes_different(eqn, along, varies=True)
    return [worst] * len(eqn.outvars)


def _makes_different(eqn: JaxprEqn, along: _Along, *, varies: bool) -> bool:
    """Whether a result of an equation's programs varies, of operands that all do or all do not."""
    asking = dataclasses.replace(along, settled=False)
    found = [_body(body, asking, [varies] * len(body.invars)) for body in programs(eqn.params)]
    return any(map(any, found))


def _gradient(eqn: JaxprEqn, along: _Along, gradient: bool, leaf: bool) -> bool:
    """Whether a gradient varies that is going to be reduced, as one of a varying leaf must not be.

    Raises:
      ValueError: the leaf varies.
    """
    if leaf and along.refuses:
        leaf_there = where(eqn.params["path"])
        raise ValueError(_GRADIENT_OF_DIFFERENT.format(leaf=leaf_there, **eqn.params))
    return gradient


def _reduced(eqn: JaxprEqn, along: _Along, value: bool, is_zero: bool) -> bool:
    """Whether a value varies that is going to be reduced, as one that is the same must not be.

    Zeros may: they are the gradients of what a loss does not depend on.

    Raises:
      AlreadyReducedError: it is the same.
    """
    if not (value or is_zero) and along.once and along.settled:
        leaf = where(eqn.params["path"])
        raise AlreadyReducedError(_REDUCED_TWICE.format(leaf=leaf, axis=along.axis))
    return value


def _is_zero(atom: Any, made_by: dict[Any, JaxprEqn]) -> bool:
    """Whether a value is nothing but zeros, as far as its own program shows."""
    while not isinstance(atom, Literal):
        eqn = made_by.get(atom)
        if eqn is None or eqn.primitive.name not in _ZERO_STAYS:
            return False
        atom = eqn.invars[0]
    return not np.any(np.asarray(atom.val))


def _scan(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    return _settled(eqn.params["jaxpr"], along, inputs, *scan_parts(eqn))


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """Which input of a scan's body is the first of its carry, and how many there are."""
    body = opened(eqn.params["jaxpr"])
    # What is sliced, and what is stacked, has a dimension more outside than inside.
    sliced = sum(
        _shape(outer) != _shape(inner) for outer, inner in zip(eqn.invars, body.invars, strict=True)
    )
    carried = sum(
        _shape(outer) == _shape(inner)
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    return len(eqn.invars) - sliced - carried, carried


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _while(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    of_condition = inputs[: eqn.params["cond_nconsts"]]
    of_body = inputs[len(of_condition) :]
    first = eqn.params["body_nconsts"]
    carried = len(of_body) - first
    asking = dataclasses.replace(along, settled=False)
    found = _settled(eqn.params["body_jaxpr"], asking, of_body, first, carried)
    (uneven,) = _body(eqn.params["cond_jaxpr"], along, [*of_condition, *found])
    if not uneven:
        return _settled(eqn.params["body_jaxpr"], along, of_body, first, carried)
    # Another number of turns on each replica, so all that is carried differs, in the body as well.
    different = [*of_body[:first], *[True] * carried]
    _settled(eqn.params["body_jaxpr"], along, different, first, carried)
    return [True] * carried


def _cond(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    chosen, *operands = inputs
    branches = [_body(branch, along, operands) for branch in eqn.params["branches"]]
    return [chosen or any(outs) for outs in zip(*branches, strict=True)]


def _linear_solve(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    """Of its programs one is run; the others are for its derivatives."""
    lengths, solvers = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first = sum(lengths[: solvers._fields.index("solve")])
    given = [*inputs[first : first + lengths.solve], *inputs[sum(lengths) :]]
    return _body(solvers.solve, along, given)


_RULES: dict[str, Callable[[JaxprEqn, _Along, list[bool]], list[bool]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
}


def _settled(body: Any, along: _Along, inputs: list[bool], first: int, carried: int) -> list[bool]:
    """The outputs of a loop's body once what it carries on has been everywhere it will be."""
    inputs = list(inputs)
    asking = dataclasses.replace(along, settled=False)
    while True:
        outs = _body(body, asking, inputs)
        carry = [a or b for a, b in zip(inputs[first : first + carried], outs, strict=False)]
        if carry == inputs[first : first + carried]:
            outs = _body(body, along, inputs)
            return [*carry, *outs[carried:]]
        inputs[first : first + carried] = carry


def _body(body: Any, along: _Along, inputs: list[bool]) -> list[bool]:
    jaxpr = opened(body)
    return _outputs(jaxpr, along, [False] * len(jaxpr.constvars), inputs)
