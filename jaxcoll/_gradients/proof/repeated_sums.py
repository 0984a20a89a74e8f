"""Sums of what a reduction has already made the same: repeated, unless they are made a mean."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._gradients.proof.primitives import SUMS
from jaxcoll._gradients.proof.walk import walk_back


@dataclasses.dataclass(frozen=True)
class RepeatedSum:
    """A sum over an axis of a value that a reduction has already made the same along it."""

    axis: str
    like: str  # the dtype and shape of the value
    line: str  # the user's line of the sum
    maker: str  # the user's line of the earlier reduction; "" if it is not found


def is_divided(out: Any, jaxpr: Jaxpr, n: int) -> bool:
    """True if all uses of a sum divide it by a multiple of `n`, or by a count: it is a mean."""
    users = [eqn for eqn in jaxpr.eqns if any(x is out for x in eqn.invars)]
    is_result = any(x is out for x in jaxpr.outvars)
    return bool(users) and not is_result and all(_divides(eqn, out, jaxpr, n) for eqn in users)


def _divides(eqn: JaxprEqn, out: Any, jaxpr: Jaxpr, n: int) -> bool:
    name, first, last = eqn.primitive.name, eqn.invars[0], eqn.invars[-1]
    if name == "div":
        return first is out and (_is_multiple(last, n) or _is_count(jaxpr, last))
    if name == "mul":
        return _is_multiple(first, n, inverse=True) or _is_multiple(last, n, inverse=True)
    moves = name in ("convert_element_type", "reshape", "copy", "broadcast_in_dim")
    return moves and is_divided(eqn.outvars[0], jaxpr, n)


def _is_multiple(atom: Any, n: int, *, inverse: bool = False) -> bool:
    """True if a value is a literal multiple of `n`; with `inverse`, 1 over such a multiple."""
    if not isinstance(atom, Literal) or not atom.val:
        return False
    value = 1 / float(atom.val) if inverse else float(atom.val)
    return round(value) % n == 0 and abs(value - round(value)) < 1e-3 and round(value) != 0


def _is_count(jaxpr: Jaxpr, atom: Any) -> bool:
    """True if a value is a sum of constants, such as `lax.psum(jnp.ones(()), axis)`."""
    eqns = [*walk_back(jaxpr, atom)]
    counting = {*SUMS, "broadcast_in_dim", "convert_element_type", "reshape"}
    return bool(eqns) and all(eqn.primitive.name in counting for eqn in eqns)
