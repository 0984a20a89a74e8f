"""The equations that a value depends on, and the user's lines of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._compat import eqns
from jaxcoll._gradients.proof.subjaxprs import equations, find_callee, programs


def walk_back(jaxpr: Jaxpr, atom: Any) -> Iterator[JaxprEqn]:
    """Yield the equations that a value depends on, nearest first, including called programs'."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    seen: set[int] = set()
    queue = [atom]
    while queue:
        x = queue.pop(0)
        eqn = None if isinstance(x, Literal) else made.get(x)
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        yield eqn
        body = find_callee(eqn)
        if body is not None:
            k = next(k for k, out in enumerate(eqn.outvars) if out is x)
            yield from walk_back(body, body.outvars[k])
        queue.extend(eqn.invars)


def find_line(jaxpr: Jaxpr, atom: Any, names: set[str] | None = None) -> str:
    """Find the user's line of the nearest equation that a value depends on, among `names`."""
    behind = (e for e in walk_back(jaxpr, atom) if names is None or e.primitive.name in names)
    return next(filter(None, map(eqns.users_line, behind)), "")


def find_nested_line(jaxpr: Jaxpr, atom: Any, line: Callable[[JaxprEqn], str]) -> str:
    """Find the first `line` of the equations behind a value and of those nested in them."""
    for eqn in walk_back(jaxpr, atom):
        # A library's kernel takes a gradient in the body of a loop.
        for e in (eqn, *(e for p in programs(eqn) for e in equations(p))):
            if text := line(e):
                return text
    return ""
