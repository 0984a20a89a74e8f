"""The origin of an equation: the user's lines, its scopes, and its lowering."""

from __future__ import annotations

import dis
import functools
import re
from typing import Any

import jax

from jaxcoll._compat.settings import LIBRARIES

_GRADIENT = re.compile(r"[/\\]jax[/\\]_src[/\\]api\.py$")
_NO_FUNCTION = re.compile(
    r"stablehlo\.(all_|collective|cross|infeed|partition_id|recv|reduce_sc|replica_id|rng\b|send)"
    r"|custom_call @\w*callback|has_side_effect = true"
)


def _frames(eqn: Any) -> tuple[Any, ...]:
    """List the stack frames in which an equation was traced, innermost first."""
    return tuple(getattr(eqn.source_info.traceback, "frames", ()))


def users_line(eqn: Any) -> str:
    """Find the innermost line outside of libraries that traced an equation, as file:line."""
    for frame in _frames(eqn):
        if not LIBRARIES.search(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def line_of_gradient(eqn: Any) -> str:
    """Find the user's line that called `jax.grad` for an equation, or "" if there is none.

    The innermost line of an equation in a backward pass is a line of the loss.
    """
    in_grad = False
    for frame in _frames(eqn):
        in_grad |= bool(_GRADIENT.search(frame.file_name)) and "grad" in frame.function_name
        if in_grad and not LIBRARIES.search(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def is_backward(eqn: Any) -> bool:
    """Return True if an equation was made by transposing a derivative.

    Equations of an inner program may lack this mark. A user's scope may have any name, so the name
    "transpose" is not enough.
    """
    return any(
        type(scope).__name__ == "Transform" and scope.name == "transpose" for scope in _scopes(eqn)
    )


def is_our_reduction(eqn: Any) -> bool:
    return any(re.fullmatch(r"[a-z_]+_[0-9a-f]{6}/pack\d+", x.name) for x in _scopes(eqn))


def only_raises(eqn: Any) -> bool:
    code = getattr(getattr(eqn.params.get("callback"), "callback_func", None), "__code__", None)
    ends = [] if code is None else [x.opname for x in dis.get_instructions(code)]
    return bool(ends) and not any(name.startswith(("RETURN", "YIELD")) for name in ends)


def is_lowered_to_functions(eqn: Any) -> bool:
    """Return True if an equation is compiled to functions of its operands alone.

    XLA may run a custom call without side effects once, or never; so it is one of these functions.
    Not so what reads the device's number, calls the host, or communicates.
    """
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    call = functools.partial(eqn.primitive.bind, **eqn.params)
    try:
        text = jax.jit(call).lower(*types).as_text()
    except Exception:  # it cannot be lowered by itself, or not for the devices here
        return False
    return not _NO_FUNCTION.search(text)


def _scopes(eqn: Any) -> tuple[Any, ...]:
    return tuple(eqn.source_info.name_stack.stack)
