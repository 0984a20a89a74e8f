"""The requested and the compiled text of a program, without running it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._collectives.scope import Scope, entered, scope_here
from jaxcoll._compat.compiler import memory_by_name
from jaxcoll._plan.packs.leaves import is_array
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._report.cost.rates import Rates, find_rates
from jaxcoll._report.shown_plan import Plan
from jaxcoll._step.mesh.mesh import bind_mesh, make_line, takes_mesh
from jaxcoll._step.mesh.world import mesh_world

Stage = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled

_HOLDING = ("traced", "lowered", "compiled")
"""Attributes in which flax's `nnx.jit` and equinox's `filter_jit`, which return functions and
programs of their own classes, keep JAX's stage of a program."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of a program, and other input of a report."""

    compiled: str  # HLO
    # HLO before any optimization, with lines of Python; None if the program is already compiled
    requested: str | None = None
    plans: tuple[Plan, ...] = ()  # plans of the traced reductions
    where: str = ""  # the topology it was compiled for; "": the local devices
    rates: Rates | None = None  # prices of these devices, if known
    # Bytes on one device by name, such as "argument" and "temp", if known
    memory: Mapping[str, int] | None = None


def compile_texts(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Texts:
    """Trace, lower and compile a program, as far as that is not done yet.

    It is a function, a result of `jax.jit`, `jax.pmap` or another library's `jit`, a
    `data_parallel` step, a `functools.partial` or method of one; or, without arguments, the result
    of `.trace`, `.lower` or `.compile`.

    Raises:
      ValueError: it is none of these, or there are arguments for a traced program.
    """
    stage, plans = find_stage(program), list[CollectivePlan]()
    if stage is None:
        scope = dataclasses.replace(scope_here(), record=plans.append)
        stage = trace(program, args, kwargs, scope)
    elif args or kwargs:
        raise ValueError(
            "`inspect` got arguments with a program that was already traced with its own; "
            "pass the function and its arguments, or the program alone."
        )
    lowered = stage.lower() if isinstance(stage, jax.stages.Traced) else stage
    compiled = lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    memory, mesh = compiled.memory_analysis(), make_line(jax.devices(), "data")
    return Texts(
        compiled.as_text() or "",
        print_requested(lowered) if isinstance(lowered, jax.stages.Lowered) else None,
        tuple(map(Plan.of, plans)),
        rates=find_rates(mesh_world(mesh, {"data": mesh.size})),
        memory=memory and memory_by_name(memory),
    )


def print_requested(lowered: jax.stages.Lowered) -> str:
    """Print the requested HLO, before any compiler pass, with source lines."""
    # Like `as_text("hlo")`, but without the values of large constants
    program: Any = lowered.compiler_ir("hlo")
    return program.as_hlo_module().to_string()


def trace(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scope: Scope) -> Stage:
    """Trace the program anew, in a scope that records the plan of each reduction.

    Raises:
      ValueError: it is not a function, or what its method `lower` returns holds no program.
    """
    program, args, kwargs = make_lowerable(program, args, kwargs)
    if hasattr(program, "trace_recorded"):  # a `data_parallel` step
        return program.trace_recorded(scope.record, *args, **kwargs)
    # The new scope is part of the key of JAX's caches, so no older trace is used.
    with entered(scope):
        # equinox's functions have no `trace`, only `lower`.
        result = getattr(program, "trace", program.lower)(*args, **kwargs)
    if (stage := find_stage(result)) is None:
        raise ValueError(
            f"`inspect`: {type(program).__name__} has a method to lower it, but the result, "
            f"{type(result).__name__}, holds no JAX program. Pass the function that it wraps."
        )
    return stage


def make_lowerable(
    program: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Jit a plain function, and prepare its arguments.

    A function with a required `mesh` gets one of all devices on the axis "data".

    Raises:
      ValueError: `program` is not a function.
    """
    if callable(program) and takes_mesh(program, kwargs):
        program = bind_mesh(program, make_line(jax.devices(), "data"))
    program, args, kwargs = unwrap(program, args, kwargs)
    if not callable(program):
        names = [f"`.{x}`" for x in ("apply", "init") if callable(getattr(program, x, None))]
        hint = f"; its functions are {' and '.join(names)}" if names else ""
        raise ValueError(
            "`inspect` expects a function and its arguments, a `data_parallel` step, a result of "
            "`.trace`, `.lower` or `.compile`, or HLO text; got "
            f"{type(program).__name__}{hint}."
        )
    is_ready: bool = hasattr(program, "lower")
    return (program, args, kwargs) if is_ready else jit_arrays(program, args, kwargs)


def find_stage(program: Any) -> Stage | None:
    """Find the traced, lowered or compiled JAX program that `program` is or holds, or None."""
    if isinstance(program, Stage):
        return program
    names = (vars(type(program)).keys() | getattr(program, "__dict__", {}).keys()) & {*_HOLDING}
    values = (getattr(program, name, None) for name in sorted(names))
    return next((x for x in values if isinstance(x, Stage)), None)


def unwrap(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Take the function out of a `functools.partial` or method, with all of its arguments.

    This unwraps functions that have a `lower`, as `jax.jit`, `jax.pmap` and `jc.data_parallel`
    return them. Any other `fun` is returned unchanged.
    """
    inner, positional, named = fun, tuple(args), dict(kwargs)
    while isinstance(inner, functools.partial | types.MethodType):
        if isinstance(inner, functools.partial):
            positional, named = (*inner.args, *positional), {**inner.keywords, **named}
            inner = inner.func
        else:
            positional, inner = (inner.__self__, *positional), inner.__func__
    is_ready = hasattr(inner, "lower")
    return (inner, positional, named) if is_ready else (fun, tuple(args), dict(kwargs))


def jit_arrays(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Jit `fun` as a function of its arrays.

    Arguments that are not arrays, such as a name or a function in a module, are bound to it.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]

    def call_with_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        positional, named = treedef.unflatten(
            next(rest) if is_dynamic else x for x, is_dynamic in zip(leaves, dynamic, strict=True)
        )
        return fun(*positional, **named)

    inner = fun.func if isinstance(fun, functools.partial) else fun
    call_with_arrays.__name__ = getattr(inner, "__name__", type(inner).__name__)
    arrays = tuple(x for x, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic)
    return jax.jit(call_with_arrays), arrays, {}
