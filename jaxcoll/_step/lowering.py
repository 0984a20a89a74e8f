"""The texts of a program: what it requests, and what the compiler makes of it. Nothing runs."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._compat.compiler import memory_by_name
from jaxcoll._mesh.mesh import given_mesh, line_of, takes_mesh
from jaxcoll._mesh.world import mesh_world
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.packs.leaves import is_array
from jaxcoll._plan.plan import Plan
from jaxcoll._prices.rates import Rates, rates_of
from jaxcoll._spmd.scope import entered, scope_here

Stage = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled

_HOLDING = ("traced", "lowered", "compiled")
"""The attributes under which other libraries hold JAX's stage of a program. flax's `nnx.jit` and
equinox's `filter_jit` hand out functions and programs of classes of their own."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of a program before it runs, and what a report needs beside them."""

    compiled: str  # HLO
    # HLO before any optimization, with its lines of Python; None if there is none any more
    requested: str | None = None
    plans: tuple[Plan, ...] = ()  # of the reductions that were traced for it
    where: str = ""  # what it was compiled for; "" if for the devices that are here
    rates: Rates | None = None  # what those devices cost; None if that is not known
    # Bytes on one device by name, such as "argument" and "temp"; None if that is not known
    memory: Mapping[str, int] | None = None


def texts_of(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: str) -> Texts:
    """Trace, lower and compile what is not compiled yet.

    The program is a function, one that `jax.jit`, `jax.pmap` or another library's own `jit`
    returned, a `data_parallel` step, a `functools.partial` or method of one; or, without
    arguments, what `.trace`, `.lower` or `.compile` returned.

    Raises:
      ValueError: it is none of these, or arguments came with what has them already.
    """
    stage = stage_of(program)
    if stage is not None:
        if args or kwargs:
            raise ValueError(
                f"`{caller}` got arguments for a program that was lowered with its own; pass the "
                "function and its arguments, or the program alone."
            )
        return _texts_of(stage)
    plans: list[CollectivePlan] = []
    return _texts_of(_traced(program, args, kwargs, plans.append, caller), plans)


def _texts_of(stage: Stage, plans: Sequence[CollectivePlan] = ()) -> Texts:
    """The texts of what is traced, lowered or compiled already."""
    lowered = stage.lower() if isinstance(stage, jax.stages.Traced) else stage
    compiled = lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    memory, mesh = compiled.memory_analysis(), line_of(jax.devices(), "data")
    return Texts(
        compiled.as_text() or "",
        requested_text(lowered) if isinstance(lowered, jax.stages.Lowered) else None,
        tuple(map(Plan.of, plans)),
        rates=rates_of(mesh_world(mesh, {"data": mesh.size})),
        memory=memory and memory_by_name(memory),
    )


def requested_text(lowered: jax.stages.Lowered) -> str:
    """Return the HLO that was requested, before any compiler has seen it, with source lines."""
    # What `as_text("hlo")` returns, but without the numbers of large constants.
    program: Any = lowered.compiler_ir("hlo")
    return program.as_hlo_module().to_string()


def _traced(
    program: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    record: Callable[[CollectivePlan], None],
    caller: str,
) -> Stage:
    """The program traced anew, so that every reduction in it says its plan."""
    program, args, kwargs = lowerable(program, args, kwargs, caller)
    if hasattr(program, "trace_recorded"):  # a `data_parallel` step
        return program.trace_recorded(record, *args, **kwargs)
    # A scope of its own is part of the key of JAX's caches: no older trace is taken for this one.
    with entered(dataclasses.replace(scope_here(), record=record)):
        # What equinox jitted goes from the function to the lowered program in one step.
        found = getattr(program, "trace", program.lower)(*args, **kwargs)
    stage = stage_of(found)
    if stage is None:
        raise ValueError(
            f"`{caller}`: {type(program).__name__} says that it can be lowered, and what it lowers "
            f"to, {type(found).__name__}, holds no program of JAX. Pass the function that it wraps."
        )
    return stage


def lowerable(
    program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what can be lowered, jitted here if nobody has, and what it is called with.

    A function that takes a `mesh` is given one, of all devices on the axis "data".

    Raises:
      ValueError: it is no function.
    """
    if callable(program) and takes_mesh(program, kwargs):
        program = given_mesh(program, line_of(jax.devices(), "data"))
    program, args, kwargs = called(program, args, kwargs)
    if not callable(program):
        functions = [name for name in ("apply", "init") if callable(getattr(program, name, None))]
        meant = f", whose functions are {' and '.join(f'`.{name}`' for name in functions)}"
        raise ValueError(
            f"`{caller}` expects a function and its arguments, a `data_parallel` step, what "
            f"`.trace`, `.lower` or `.compile` returned, or HLO text; got "
            f"{type(program).__name__}{meant if functions else ''}."
        )
    is_ready: bool = hasattr(program, "lower")
    return (program, args, kwargs) if is_ready else jitted(program, args, kwargs)


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
