"""Reader of the call that a frame is in: source and variables. Needs no JAX, runs nothing."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import inspect
import itertools
import linecache
import sys
from types import BuiltinMethodType, FrameType, MethodType
from typing import Any

_TAKES_LOCALS = {"locals", "vars", "eval", "exec", "dir", "f_locals"}


def read_call(frame: FrameType) -> tuple[str, str, Any]:
    """Read the source of the call that a frame is in, and the name and object of what it calls.

    The object is None unless names and attributes lead to it: nothing of the user's is run.
    """
    text, node = _parse_call(frame)
    node = node.func if isinstance(node, ast.Call) else node
    name = getattr(node, "attr", getattr(node, "id", ""))
    return " ".join(text.split()), name, _object(node, frame) if node else None


def _parse_call(frame: FrameType) -> tuple[str, ast.AST | None]:
    positions = frame.f_code.co_positions()
    row, last, left, right = next(itertools.islice(positions, frame.f_lasti // 2, None))
    file = frame.f_code.co_filename
    if row is None or last is None or left is None or right is None:
        return linecache.getline(file, frame.f_lineno or 0).strip(), None
    lines = [linecache.getline(file, n, frame.f_globals).encode() for n in range(row, last + 1)]
    lines[-1] = lines[-1][:right]
    lines[0] = lines[0][left:]
    text = b"".join(lines).decode(errors="replace").strip()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return text, ast.parse(text, mode="eval").body
    return text, None


def read_function(frame: FrameType) -> tuple[str, Any]:
    """Read the name and object of the function that a frame calls in the end."""
    _, name, function = read_call(frame)
    function = unwrap(function)
    if type(function).__name__ == "nb_bound_method":  # it has no name
        is_array = type(function.__self__).__name__ == "ArrayImpl"
        name = "block_until_ready" if is_array else name  # an array's other methods end at once
    return name, function


def read_barrier(frame: FrameType) -> str | None:
    """Read the id of the barrier that a frame waits at, if it is a constant or in a variable."""
    _, call = _parse_call(frame)
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    key = first.value if isinstance(first, ast.Constant) else first and _object(first, frame)
    return key if type(key) is str else None


def unwrap(function: Any) -> Any:
    """Find the function that a `partial` or a method calls."""
    while (kind := type(function)) in (functools.partial, MethodType):
        args = function.args if kind is functools.partial else ()
        function = function.func if kind is functools.partial else function.__func__
        in_c = type(function) is BuiltinMethodType
        if args and in_c and type(function.__self__) is contextvars.Context:
            function = args[0]  # Context.run, as in asyncio.to_thread
    return function


def _object(node: ast.AST, frame: FrameType) -> Any:
    match node:
        case ast.Name(id=name):
            return look_up(frame, name)
        case ast.Attribute(value=value, attr=name):
            owner = _object(value, frame)
            for each in (owner, type(owner)):  # no property, and no __getattr__
                if name in (held := getattr(each, "__dict__", {})):
                    return held[name]
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            owner = _object(value, frame)
            if type(owner) in (dict, list, tuple):
                with contextlib.suppress(LookupError, TypeError):
                    return owner[key]
    return None


def look_up(frame: FrameType, name: str) -> Any:
    """Look up a variable that a frame sees; None if there is none."""
    code = frame.f_code
    is_copy = sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and _TAKES_LOCALS.intersection(code.co_names):
        return frame.f_globals.get(name)  # the copy is one with the program's own `locals()`
    variables = frame.f_locals
    value = variables.get(name, frame.f_globals.get(name))
    if is_copy:
        variables.clear()  # the frame keeps it, and with it large arrays
    return value
