"""Derivatives of a reduced loss where no types are: on each replica they begin anew, and add up."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.subjaxprs import RETYPING
from jaxcoll._jaxpr.summed_again import divided

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


def is_own(fact: int) -> bool:
    """Whether a value is a replica's own term of such a derivative."""
    return fact & VARIES != 0 and fact & REPEATED != 0


def is_wrong(fact: int) -> bool:
    """Whether a value is not what it would be if autodiff knew that there is one loss."""
    return is_own(fact) or fact & TOO_LARGE != 0


def computed(eqn: JaxprEqn, ins: Sequence[int], found: int) -> int:
    """What an equation outside of a backward pass makes of it: `found`, if of linear terms."""
    own, name = [*map(is_own, ins)], eqn.primitive.name
    if not any(own):
        return found
    if name in _SAME_FOR_ANY_SCALE:
        return found & ~REPEATED
    product = name in _PRODUCTS and sum(own) == 1 and (name != "div" or own[0])
    linear = product or (name in _LINEAR and not (name == "select_n" and own[0]))
    return found if linear else found | TOO_LARGE


def exchanged(eqn: JaxprEqn, ins: Sequence[int], jaxpr: Jaxpr, n: int) -> list[int]:
    """The same of an equation that has to do with an axis of `n` replicas; without `VARIES`."""
    name, outs = eqn.primitive.name, eqn.outvars
    if name in _SUMMED and len(ins) == len(outs):
        return [
            fact & TOO_LARGE | TOO_LARGE * (is_own(fact) and not divided(out, jaxpr, n))
            for fact, out in zip(ins, outs, strict=True)
        ]
    made = (REPEATED if name in _SENT else TOO_LARGE) * any(map(is_own, ins))
    return [made | TOO_LARGE * any(fact & TOO_LARGE for fact in ins)] * len(outs)
