"""Which results of a traced program keep the elements of its inputs apart, by its equations.

An optimizer that does may be run on parts of its trees: whatever their values are, and however
many steps it has made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxcoll._jaxpr.dataflow import Dataflow
from jaxcoll._jaxpr.subjaxprs import programs, shape_of

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
    itself if their result has the shape of their operand. Of each input is given the number of its
    array, or None for a number.
    """
    return _Origins({*program.jaxpr.constvars}).outputs(program, inputs)


class _Origins(Dataflow[Origin]):
    constant = None

    def __init__(self, held: set[Any]) -> None:
        super().__init__()
        self.held = held  # constants of the program

    def captured(self, var: Any) -> Origin:
        return "a constant array" if var in self.held and shape_of(var) else None

    def join(self, facts: Sequence[Origin]) -> Origin:
        mixed = [x for x in facts if isinstance(x, str)]
        known = {x for x in facts if x is not None}
        if mixed or len(known) > 1:
            return mixed[0] if mixed else "arrays that are put together"
        return next(iter(known), None)

    def chosen(self, by: Origin, fact: Origin, eqn: JaxprEqn) -> Origin:
        return self.join([by, fact])

    def row(self, fact: Origin) -> Origin:
        return "scan" if isinstance(fact, int) else fact

    def equation(self, eqn: JaxprEqn, ins: list[Origin], jaxpr: Jaxpr) -> list[Origin]:
        return self.inside(eqn, ins) if programs(eqn) else self.opaque(eqn, ins)

    def opaque(self, eqn: JaxprEqn, ins: list[Origin]) -> list[Origin]:
        name, found = eqn.primitive.name, self.join(ins)
        if name in _BY_PLACE and any(map(shape_of, eqn.outvars)):
            return [self.join([found, name])] * len(eqn.outvars)
        if not isinstance(found, int):
            return [found] * len(eqn.outvars)
        arrays = {shape_of(x) for x, each in zip(eqn.invars, ins, strict=True) if each == found}
        mixes = name in _MIXING or len(arrays) > 1
        return [name if mixes or shape_of(x) not in arrays else found for x in eqn.outvars]
