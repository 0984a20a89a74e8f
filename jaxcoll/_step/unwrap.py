"""What Python or other libraries wrap around JAX's own functions and programs, taken off.

flax's `nnx.jit` and equinox's `filter_jit` hand out functions, and lowered and compiled programs,
of classes of their own. Each holds JAX's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._mesh.placement import is_array

Stage = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled

_HOLDING = ("traced", "lowered", "compiled")
"""The attributes under which wrappers hold JAX's stage of a program."""


def stage_of(program: Any) -> Stage | None:
    """The traced, lowered or compiled program of JAX that `program` is or holds; None if none."""
    if isinstance(program, Stage):
        return program
    held = (vars(type(program)).keys() | getattr(program, "__dict__", {}).keys()) & {*_HOLDING}
    found = (getattr(program, name, None) for name in sorted(held))
    return next((x for x in found if isinstance(x, Stage)), None)


def called(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A function and what it is called with, if `fun` is one that some of that is bound to.

    `functools.partial` and methods of what can be lowered by itself, as `jax.jit`, `jax.pmap` and
    `jc.data_parallel` return it, are taken apart; anything else stays as it is.
    """
    inner, given, named = fun, tuple(args), dict(kwargs)
    while isinstance(inner, functools.partial | types.MethodType):
        if isinstance(inner, functools.partial):
            given, named = (*inner.args, *given), {**inner.keywords, **named}
            inner = inner.func
        else:
            given, inner = (inner.__self__, *given), inner.__func__
    return (inner, given, named) if hasattr(inner, "lower") else (fun, tuple(args), dict(kwargs))


def jitted(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """`fun` as `jax.jit` takes it, and what it is called with then.

    Arguments that are not arrays, such as a name or a function in a module, are bound to it.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]

    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        given, named = treedef.unflatten(
            next(rest) if is_dynamic else x for x, is_dynamic in zip(leaves, dynamic, strict=True)
        )
        return fun(*given, **named)

    inner = fun.func if isinstance(fun, functools.partial) else fun
    of_arrays.__name__ = getattr(inner, "__name__", type(inner).__name__)
    arrays = tuple(x for x, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic)
    return jax.jit(of_arrays), arrays, {}
