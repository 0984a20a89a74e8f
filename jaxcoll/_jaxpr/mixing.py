"""Which results of a traced program keep the elements of its inputs apart, by its equations.

An optimizer that does may be run on parts of its trees: whatever their values are, and however
many steps it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxcoll._jaxpr.replication import scan_parts
from jaxcoll._jaxpr.subjaxprs import CALLS, opened, programs

Origin = int | str | None
"""Where a value comes from: an array, each element from the one at its place in the array of that
number; None, from constants and numbers alone; or from several elements, through the operation of
that name."""

_MIXING = {
    "sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "dot_general", "conv_general_dilated", "fft", "transpose", "rev", "reshape", "gather",
    "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_min",
    "scatter_max", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "slice", "split",
    "triangular_solve", "cholesky", "qr", "svd", "eigh", "lu", "householder_product", "psum",
    "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "reduce_scatter", "psum_invariant",
    "all_gather_invariant", "reduce_window", "reduce_window_sum", "reduce_window_max",
    "reduce_window_min", "select_and_scatter_add", "eig", "schur", "tridiagonal_solve",
    "pure_callback", "io_callback",
}  # fmt: skip
"""What mixes elements even where its result has the shape of its operand."""
_BY_PLACE = {"iota", "random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}
"""What makes another number for each place from nothing but a shape and a key."""


def origins(program: ClosedJaxpr, inputs: Sequence[Origin]) -> list[Origin]:
    """Where each output comes from.

    Law: an output of which this is a number, or None, has at each place a value that depends on
    no other place of any array: no value of any input, and no branch that is taken, changes that.
    Operations without equations to read, such as kernels, are believed to treat every element by
    itself if their result has the shape of their operand.

    Args:
      program: traced.
      inputs: of each input, the number of its array, or None for a number.

    Returns:
      One answer for each output.
    """
    consts = [None if not x.aval.shape else "a constant array" for x in program.jaxpr.constvars]
    return _outputs(program.jaxpr, consts, inputs)


def _joined(*found: Origin) -> Origin:
    """Where a value comes from that is made of several, place by place."""
    known = {x for x in found if x is not None}
    mixed = [x for x in found if isinstance(x, str)]
    if mixed:
        return mixed[0]
    return "arrays that are put together" if len(known) > 1 else next(iter(known), None)


def _outputs(jaxpr: Jaxpr, consts: Sequence[Origin], inputs: Sequence[Origin]) -> list[Origin]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def of(atom: Any) -> Origin:
        return None if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _equation(eqn, [*map(of, eqn.invars)]), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _equation(eqn: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn, inputs)
    bodies = [*programs(eqn.params)]
    if name in CALLS and bodies and len(bodies[0].invars) == len(inputs):
        return _body(bodies[0], inputs)  # of a custom derivative, the first is the function
    found = _joined(*inputs)
    if name in _BY_PLACE and any(_shape(x) for x in eqn.outvars):
        return [_joined(found, name)] * len(eqn.outvars)
    if not isinstance(found, int):
        return [found] * len(eqn.outvars)
    arrays = {_shape(x) for x, origin in zip(eqn.invars, inputs, strict=True) if origin == found}
    mixes = name in _MIXING or len(arrays) > 1
    return [name if mixes or _shape(x) not in arrays else found for x in eqn.outvars]


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _body(body: Any, inputs: Sequence[Origin]) -> list[Origin]:
    jaxpr = opened(body)
    return _outputs(jaxpr, [None] * len(jaxpr.constvars), inputs)


def _cond(eqn: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
    chosen, *operands = inputs
    branches = [_body(branch, operands) for branch in eqn.params["branches"]]
    return [_joined(chosen, *found) for found in zip(*branches, strict=True)]


def _scan(eqn: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
    first, carried = scan_parts(eqn)
    sliced = ["scan" if isinstance(x, int) else x for x in inputs[first + carried :]]
    found = _settled(eqn.params["jaxpr"], [*inputs[: first + carried], *sliced], first, carried)
    stacked: list[Origin] = ["scan" if isinstance(x, int) else x for x in found[carried:]]
    return [*found[:carried], *stacked]


def _while(eqn: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
    of_condition = inputs[: eqn.params["cond_nconsts"]]
    of_body = inputs[len(of_condition) :]
    first = eqn.params["body_nconsts"]
    found = _settled(eqn.params["body_jaxpr"], of_body, first, len(of_body) - first)
    (until,) = _body(eqn.params["cond_jaxpr"], [*of_condition, *found])
    return [_joined(until, each) for each in found]


def _settled(body: Any, inputs: list[Origin], first: int, carried: int) -> list[Origin]:
    """The outputs of a loop's body once what it carries on has been everywhere it will be."""
    while True:
        outs = _body(body, inputs)
        before = inputs[first : first + carried]
        carry = [_joined(a, b) for a, b in zip(before, outs, strict=False)]
        if carry == before:
            return [*carry, *outs[carried:]]
        inputs = [*inputs[:first], *carry, *inputs[first + carried :]]


_RULES: dict[str, Callable[[JaxprEqn, list[Origin]], list[Origin]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
