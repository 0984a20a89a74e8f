"""Which results of a traced program are the same on every replica, proven from the program.

A replica function of a strategy is traced without types that tell replicas apart: only then is
a gradient taken inside it the replica's own, a constant each replica's own copy, and a loop from
a constant accepted. What such types would have said of its results is read off its equations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._spmd.programs import CALLS, opened, programs

_EQUALIZING = {"psum", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_ASK_THE_HOST = ("callback", "infeed", "rng_uniform")


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
    """
    return _outputs(jaxpr.jaxpr, axis, [False] * len(jaxpr.jaxpr.constvars), list(varying))


def same_outputs(program: ClosedJaxpr, axes: Sequence[str]) -> list[frozenset[str]]:
    """Along which of `axes` each output is the same, whatever the program was made from.

    Law: as in `varying_outputs`, with inputs and captured values that all vary.
    """
    jaxpr = program.jaxpr
    varying = {
        axis: _outputs(jaxpr, axis, [True] * len(jaxpr.constvars), [True] * len(jaxpr.invars))
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
        # A jitted function's own name is no axis.
        any(_says({k: v for k, v in eqn.params.items() if k != "name"}, axis) for axis in axes)
        or any(mentions(inner, axes) for inner in programs(eqn.params))
        for eqn in program.eqns
    )


def _outputs(jaxpr: Jaxpr, axis: str, consts: Sequence[bool], inputs: Sequence[bool]) -> list[bool]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def varies(atom: Any) -> bool:
        return not isinstance(atom, Literal) and known[atom]

    for eqn in jaxpr.eqns:
        known.update(
            zip(eqn.outvars, _equation(eqn, axis, [*map(varies, eqn.invars)]), strict=True)
        )
    return [varies(atom) for atom in jaxpr.outvars]


def _equation(eqn: JaxprEqn, axis: str, inputs: list[bool]) -> list[bool]:
    """Whether each result of one equation varies."""
    name, params = eqn.primitive.name, eqn.params
    if _says(params, axis):
        same = name == _compat.SAME or (
            name in _EQUALIZING and params.get("axis_index_groups") is None
        )
        return [not same] * len(eqn.outvars)
    if _asks_the_host(name) or any(hasattr(x.aval, "inner_aval") for x in eqn.invars):
        return [True] * len(eqn.outvars)  # who knows what the host says, or a `Ref` has been given
    if not any(programs(params)):
        return [any(inputs)] * len(eqn.outvars)
    return _RULES.get(name, _call)(eqn, axis, inputs)


def _asks_the_host(name: str) -> bool:
    return any(word in name for word in _ASK_THE_HOST)


def _says(params: dict[str, Any], axis: str) -> bool:
    """Whether a parameter of an equation is the axis, or a collection with the axis in it."""
    return any(
        p == axis if isinstance(p, str) else isinstance(p, tuple | list | frozenset) and axis in p
        for p in params.values()
    )


def _call(eqn: JaxprEqn, axis: str, inputs: list[bool]) -> list[bool]:
    """A call of one program with the equation's own operands; of anything else the worst."""
    body, *others = programs(eqn.params)
    if eqn.primitive.name in CALLS and not others and len(body.invars) == len(inputs):
        return _body(body, axis, inputs)
    worst = any(inputs) or any(_may_vary(body, axis) for body in programs(eqn.params))
    return [worst] * len(eqn.outvars)


def _scan(eqn: JaxprEqn, axis: str, inputs: list[bool]) -> list[bool]:
    return _settled(eqn.params["jaxpr"], axis, inputs, *scan_parts(eqn))


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


def _while(eqn: JaxprEqn, axis: str, inputs: list[bool]) -> list[bool]:
    of_condition = inputs[: eqn.params["cond_nconsts"]]
    of_body = inputs[len(of_condition) :]
    first = eqn.params["body_nconsts"]
    carried = len(of_body) - first
    found = _settled(eqn.params["body_jaxpr"], axis, of_body, first, carried)
    (uneven,) = _body(eqn.params["cond_jaxpr"], axis, [*of_condition, *found])
    return [True] * carried if uneven else found


def _cond(eqn: JaxprEqn, axis: str, inputs: list[bool]) -> list[bool]:
    chosen, *operands = inputs
    branches = [_body(branch, axis, operands) for branch in eqn.params["branches"]]
    return [chosen or any(outs) for outs in zip(*branches, strict=True)]


_RULES: dict[str, Callable[[JaxprEqn, str, list[bool]], list[bool]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _settled(body: Any, axis: str, inputs: list[bool], first: int, carried: int) -> list[bool]:
    """The outputs of a loop's body once what it carries on has been everywhere it will be."""
    inputs = list(inputs)
    while True:
        outs = _body(body, axis, inputs)
        carry = [a or b for a, b in zip(inputs[first : first + carried], outs, strict=False)]
        if carry == inputs[first : first + carried]:
            return [*carry, *outs[carried:]]
        inputs[first : first + carried] = carry


def _body(body: Any, axis: str, inputs: list[bool]) -> list[bool]:
    jaxpr = opened(body)
    return _outputs(jaxpr, axis, [False] * len(jaxpr.constvars), inputs)


def _may_vary(body: Jaxpr, axis: str) -> bool:
    """Whether a program without varying inputs may make something that varies."""
    return any(
        _says(eqn.params, axis)
        or _asks_the_host(eqn.primitive.name)
        or any(_may_vary(inner, axis) for inner in programs(eqn.params))
        for eqn in body.eqns
    )
