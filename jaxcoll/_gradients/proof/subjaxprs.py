"""The jaxprs that an equation runs, and the equations of a jaxpr, including nested ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxcoll._compat import eqns

_CALLS = {"jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
_CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr"}
"""Primitives that run one program, once, on the equation's operands."""


def open_jaxpr(program: Any) -> Any:
    """Drop the values of the constants of a jaxpr."""
    return getattr(program, "jaxpr", program)


def programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """List all programs among an equation's parameters, including those for derivatives."""
    # JAX 0.12 has primitives, such as that of `lax.custom_root`, with parameters of their own.
    nested = getattr(eqn.params.get("_prim"), "params", {})
    params = [p if isinstance(p, tuple | list) else [p] for p in (eqn.params | nested).values()]
    return [open_jaxpr(p) for several in params for p in several if hasattr(open_jaxpr(p), "eqns")]


def find_callee(eqn: JaxprEqn) -> Jaxpr | None:
    """Find the program that an equation runs once, on its operands; None if there is none."""
    bodies = programs(eqn) if eqn.primitive.name in _CALLS else []
    # For a custom derivative, the first program is the function.
    return bodies[0] if bodies and len(bodies[0].invars) == len(eqn.invars) else None


def root_solver(eqn: JaxprEqn) -> Jaxpr | None:
    """Find the solver of a JAX 0.12 `lax.custom_root`, run on the first operands; or None."""
    nested = getattr(eqn.params.get("_prim"), "params", {})
    return open_jaxpr(nested["solve_jaxpr"]) if "solve_jaxpr" in nested else None


def find_carry(eqn: JaxprEqn) -> tuple[Any, int, int]:
    """Find the body of a `scan` or `while`, the index of its first carry, and their number."""
    if eqn.primitive.name == "while":
        first = eqn.params["body_nconsts"]
        return eqn.params["body_jaxpr"], first, len(eqn.outvars)
    body = open_jaxpr(eqn.params["jaxpr"])
    # JAX versions name a scan's parameters differently, but in all of them, values that are sliced
    # or stacked have one more dimension outside the body.
    sliced = sum(map(_grows, eqn.invars, body.invars))
    carried = len(eqn.outvars) - sum(map(_grows, eqn.outvars, body.outvars))
    return body, len(eqn.invars) - sliced - carried, carried


def _grows(outer: Any, inner: Any) -> bool:
    return outer.aval.shape != inner.aval.shape


def equations(program: Any) -> Iterator[JaxprEqn]:
    """Yield all equations, including those of nested programs."""
    for eqn in open_jaxpr(program).eqns:
        yield eqn
        for body in programs(eqn):
            yield from equations(body)


def ends_in_error(program: Any) -> bool:
    """True if a program always calls a host function that only raises."""
    bodies = filter(None, map(find_callee, open_jaxpr(program).eqns))
    return any(map(eqns.only_raises, open_jaxpr(program).eqns)) or any(map(ends_in_error, bodies))


def is_ref(atom: Any) -> bool:
    return hasattr(atom.aval, "inner_aval")


def show_line(line: str) -> str:
    """Format a line of the user's Python for a message; "" if it is not known."""
    return f" ({line})" if line else ""


def get_shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
