"""Sums by `jax.lax` of what a reduction of ours has made the same on every replica.

Our own reductions refuse such a value. `lax.psum` takes it, as it takes a number that is the same
everywhere in order to count replicas, and gives it as many times too large as there are replicas.
`lax.pmean` divides by their number at once, so it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll import _compat
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._jaxpr.subjaxprs import CALLS, opened, programs

_MOVES = {"pvary", "pcast", "reshape", "squeeze", "expand_dims", "transpose", "copy", "neg"}
_MOVES |= {"convert_element_type", "broadcast_in_dim", "slice", "concatenate", "div", _compat.SAME}

_SUMMED_AGAIN = """\
`lax.psum` over {axis!r}{at} of {like}: a reduction of jaxcoll has made it the same on every \
replica already, so this sum is {n} times too large. Reduce it no more; or, if it is to be counted \
once for each replica, multiply it by `lax.axis_size({axis!r})`."""


def check_sums(program: Any, axes: Mapping[str, int]) -> None:
    """Refuse a traced step that sums once more what has been reduced already.

    Args:
      program: of one replica; results of reductions are marked in it.
      axes: mapped axes with marks, and their sizes.

    Raises:
      AlreadyReducedError: it sums the result of a reduction, which was no more than moved or cast
        since, and does not divide by the number of replicas next.
    """
    for axis, n in axes.items():
        jaxpr = opened(program)
        _read(jaxpr, axis, n, [False] * len(jaxpr.invars))


def _read(jaxpr: Jaxpr, axis: str, n: int, inputs: Sequence[bool]) -> list[bool]:
    """Whether each output is the result of a reduction over the axis."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> bool:
        return not isinstance(atom, Literal) and known.get(atom, False)

    for eqn in jaxpr.eqns:
        name, ins, bodies = eqn.primitive.name, [*map(of, eqn.invars)], [*programs(eqn.params)]
        outs = [name in _MOVES and all(ins)] * len(eqn.outvars)
        if name == _compat.SAME and axis in eqn.params["axes"]:
            outs = [True]
        elif name in CALLS and len(bodies) == 1 and len(bodies[0].invars) == len(ins):
            outs = _read(bodies[0], axis, n, ins)
        else:
            for body in bodies:
                _read(body, axis, n, [False] * len(body.invars))
        if name.startswith("psum") and axis in eqn.params["axes"]:
            _check(eqn, ins, jaxpr, axis, n)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [*map(of, jaxpr.outvars)]


def _check(eqn: JaxprEqn, ins: Sequence[bool], jaxpr: Jaxpr, axis: str, n: int) -> None:
    if "transpose" in str(eqn.source_info.name_stack):
        return
    for again, out in zip(ins, eqn.outvars, strict=True):
        if again and not _divided(out, jaxpr, n):
            aval: Any = out.aval
            like = f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"
            line = _compat.users_line(eqn)
            at = f" ({line})" if line else ""
            raise AlreadyReducedError(_SUMMED_AGAIN.format(axis=axis, at=at, like=like, n=n))


def _divided(out: Any, jaxpr: Jaxpr, n: int) -> bool:
    """Whether nothing becomes of a value but its quotient by a multiple of the number `n`."""
    users = [eqn for eqn in jaxpr.eqns if out in eqn.invars]
    return out not in jaxpr.outvars and all(_divides(eqn, n) for eqn in users)


def _divides(eqn: JaxprEqn, n: int) -> bool:
    by = eqn.invars[-1]
    return eqn.primitive.name == "div" and isinstance(by, Literal) and by.val % n == 0
