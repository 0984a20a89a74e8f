"""Which of a traced program's last outputs the others do not depend on."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, Literal

from jaxcoll._jaxpr.subjaxprs import opened


def unused_outputs(program: Any, count: int) -> list[int]:
    """Those of the last `count` outputs that neither another output nor an effect depends on.

    An equation is taken to need all of its operands.

    Returns:
      Their places among these `count`.
    """
    jaxpr: Jaxpr = opened(program)
    first = len(jaxpr.outvars) - count
    needed = {var for var in jaxpr.outvars[:first] if not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or needed.intersection(eqn.outvars):
            needed.update(var for var in eqn.invars if not isinstance(var, Literal))
    last = jaxpr.outvars[first:]
    return [k for k, var in enumerate(last) if isinstance(var, Literal) or var not in needed]
