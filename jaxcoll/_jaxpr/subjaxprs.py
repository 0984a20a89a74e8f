"""The programs that an equation runs, and the equations of a program and of those within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

_CALLS = {"jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
_CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr"}
"""Primitives that run one program, once, with the equation's own operands."""


def opened(program: Any) -> Any:
    """A program without the values of its constants."""
    return getattr(program, "jaxpr", program)


def programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """All programs among an equation's parameters, whether it runs them or their derivatives."""
    # JAX 0.12 has primitives, such as that of `lax.custom_root`, with parameters of their own.
    own = getattr(eqn.params.get("_prim"), "params", {})
    params = [p if isinstance(p, tuple | list) else [p] for p in (eqn.params | own).values()]
    return [opened(p) for several in params for p in several if hasattr(opened(p), "eqns")]


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that an equation runs once with its own operands; None if there is none."""
    bodies = programs(eqn) if eqn.primitive.name in _CALLS else []
    # Of a custom derivative, the first is the function.
    return bodies[0] if bodies and len(bodies[0].invars) == len(eqn.invars) else None


def root_solver(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the program of JAX 0.12's `lax.custom_root`, which has the first operands."""
    own = getattr(eqn.params.get("_prim"), "params", {})
    return opened(own["solve_jaxpr"]) if "solve_jaxpr" in own else None


def carry_of(eqn: JaxprEqn) -> tuple[Any, int, int]:
    """The body of a `scan` or `while`, the first input that it carries, and their number."""
    if eqn.primitive.name == "while":
        first = eqn.params["body_nconsts"]
        return eqn.params["body_jaxpr"], first, len(eqn.outvars)
    body = opened(eqn.params["jaxpr"])
    # JAX versions name a scan's parameters differently, but in all of them what is sliced or
    # stacked has one dimension more outside of the body.
    sliced = sum(map(_grows, eqn.invars, body.invars))
    carried = len(eqn.outvars) - sum(map(_grows, eqn.outvars, body.outvars))
    return body, len(eqn.invars) - sliced - carried, carried


def _grows(outer: Any, inner: Any) -> bool:
    return outer.aval.shape != inner.aval.shape


def equations(program: Any) -> Iterator[JaxprEqn]:
    """All equations, also of programs within."""
    for eqn in opened(program).eqns:
        yield eqn
        for body in programs(eqn):
            yield from equations(body)


def contains(program: Any, primitive: str) -> bool:
    """True if a program has an equation of that primitive anywhere."""
    return any(eqn.primitive.name == primitive for eqn in equations(program))


def is_ref(atom: Any) -> bool:
    """True if a variable is a place that may be written."""
    return hasattr(atom.aval, "inner_aval")


def at_line(line: str) -> str:
    """A line of the user's Python, if it is known, as it stands in a message."""
    return f" ({line})" if line else ""


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return getattr(atom.aval, "shape", ())


def like(array: Any) -> str:
    """The type of an array, or of a type itself, in a message, as in float32[3, 5]."""
    return f"{array.dtype.name}{[*array.shape]}"
