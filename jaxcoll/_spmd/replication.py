"""Which results of a traced program are the same on every replica, proven from the program.

A replica function of a strategy is traced without types that tell replicas apart: only then is
a gradient taken inside it the replica's own, a constant each replica's own copy, and a loop from
a constant accepted. What such types would have said of its results is read off its equations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat, _compat_marks
from jaxcoll._plan.leaves import where
from jaxcoll._spmd.programs import CALLS, opened, programs

_EQUALIZING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_RETYPING = {"pvary", "pcast", _compat.THROUGH}
_ASK_THE_HOST = ("callback", "infeed", "rng_uniform")

_GRADIENT_OF_DIFFERENT = """\
`{caller}` over {axis!r}: {leaf} differs between replicas, or nothing shows that it does not, so \
reducing its gradient would mix those of different values. What to do: if it is the same \
everywhere, let it enter as one value for all replicas (an array or a `Mirrored`, no \
`PerReplica`, and not through `jax.lax.pcast`), or make it so with `jc.broadcast`; if it is meant \
to differ (an expert, a part of a sharded parameter, the batch), take its gradient with \
`jax.grad` of this replica's own loss, or run the step in a `jax.shard_map` with its checks on, \
where `jc.grad` keeps it on its replica."""


@dataclasses.dataclass(frozen=True)
class _Along:
    """What is asked of a program: which axis, and whether a marked gradient may be refused."""

    axis: str
    refuses: bool


def varying_outputs(jaxpr: ClosedJaxpr, axis: str, varying: Sequence[bool]) -> list[bool]:
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
    """
    along = _Along(axis, refuses=True)
    return _outputs(jaxpr.jaxpr, along, [False] * len(jaxpr.jaxpr.constvars), list(varying))


def check_gradients(program: ClosedJaxpr, axes: Sequence[str]) -> None:
    """Refuse a program that reduces the gradient of something that differs between replicas.

    Args:
      program: without inputs, made from captured values whose own types say along which axes they
        vary.
      axes: axes that types tell replicas apart on.

    Raises:
      ValueError: as in `varying_outputs`.
    """
    if has(program.jaxpr, _compat_marks.GRADIENT):
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
            eqn.primitive.name != _compat_marks.GRADIENT
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

    for eqn in jaxpr.eqns:
        known.update(
            zip(eqn.outvars, _equation(eqn, along, [*map(varies, eqn.invars)]), strict=True)
        )
    return [varies(atom) for atom in jaxpr.outvars]


def _equation(eqn: JaxprEqn, along: _Along, inputs: list[bool]) -> list[bool]:
    """Whether each result of one equation varies."""
    name, params = eqn.primitive.name, eqn.params
    if _says(params, along.axis):
        if name == _compat_marks.GRADIENT:
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
    found = [_body(body, along, [varies] * len(body.invars)) for body in programs(eqn.params)]
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
    found = _settled(eqn.params["body_jaxpr"], along, of_body, first, carried)
    (uneven,) = _body(eqn.params["cond_jaxpr"], along, [*of_condition, *found])
    if not uneven:
        return found
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
    while True:
        outs = _body(body, along, inputs)
        carry = [a or b for a, b in zip(inputs[first : first + carried], outs, strict=False)]
        if carry == inputs[first : first + carried]:
            return [*carry, *outs[carried:]]
        inputs[first : first + carried] = carry


def _body(body: Any, along: _Along, inputs: list[bool]) -> list[bool]:
    jaxpr = opened(body)
    return _outputs(jaxpr, along, [False] * len(jaxpr.constvars), inputs)
