"""Programs within a traced program: what its equations call, loop over or choose among."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

CALLS = {"jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr"}
"""Primitives that carry out one program, once, with the equation's own operands."""


def programs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The programs among an equation's parameters."""
    for param in params.values():
        for p in param if isinstance(param, tuple | list) else [param]:
            if hasattr(opened(p), "eqns"):
                yield opened(p)


def opened(program: Any) -> Any:
    """A program without the values of its constants."""
    return getattr(program, "jaxpr", program)
