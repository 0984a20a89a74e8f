"""The texts of a program: what it requests, and what the compiler makes of it. Nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._compat.compiler import memory_by_name
from jaxcoll._jaxpr.loop_reductions import Repeated, repeated_reductions
from jaxcoll._mesh.machine_costs import terms_here
from jaxcoll._mesh.mesh import given_mesh, line_of, takes_mesh
from jaxcoll._mesh.world import mesh_world, scope_here
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.scope import entered
from jaxcoll._step.data_parallel import DataParallel
from jaxcoll._step.unwrap import Stage, called, jitted, stage_of


@dataclasses.dataclass(frozen=True)
class Texts:
    """What is known of a program before it runs."""

    compiled: str  # HLO
    # StableHLO with its lines of Python; None if there is none any more
    requested: str | None = None
    plans: tuple[Plan, ...] = ()  # of the reductions that were traced for it
    where: str = ""  # what it was compiled for; "" if for the devices that are here
    terms: Terms | None = None  # what those devices cost; None if that is not known
    # Reductions that stand in a loop which only adds up what they return; of a program that was
    # lowered or compiled already, and of `jax.pmap`'s, nobody has looked
    repeated: tuple[Repeated, ...] = ()
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
    if callable(program) and takes_mesh(program, kwargs):
        program = given_mesh(program, line_of(jax.devices(), "data"))
    plans: list[Plan] = []
    return _texts_of(_traced(program, args, kwargs, plans.append, caller), plans)


def _texts_of(stage: Stage, plans: Sequence[Plan] = ()) -> Texts:
    """The texts of what is traced, lowered or compiled already."""
    lowered = stage.lower() if isinstance(stage, jax.stages.Traced) else stage
    compiled = lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    memory = compiled.memory_analysis()
    return Texts(
        compiled.as_text() or "",
        lowered.as_text(debug_info=True) if isinstance(lowered, jax.stages.Lowered) else None,
        tuple(plans),
        terms=_terms(),
        repeated=repeated_reductions(stage.jaxpr) if isinstance(stage, jax.stages.Traced) else (),
        memory=memory and memory_by_name(memory),
    )


def _terms() -> Terms:
    """What a program costs over all devices that are here."""
    mesh = line_of(jax.devices(), "data")
    return terms_here(mesh_world(mesh, {"data": mesh.size}))


def _traced(
    program: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    record: Callable[[Plan], None],
    caller: str,
) -> Stage:
    """The program traced anew, so that every reduction in it says its plan."""
    program, args, kwargs = called(program, args, kwargs)
    if isinstance(program, DataParallel):
        return program.trace_recorded(record, *args, **kwargs)
    if not callable(program):
        raise ValueError(
            f"`{caller}` expects a function and its arguments, a `data_parallel` step, what "
            f"`.trace`, `.lower` or `.compile` returned, or HLO text; got {_what(program)}."
        )
    jittable: Any = program
    if not hasattr(program, "lower"):
        jittable, args, kwargs = jitted(program, args, kwargs)
    # A scope of its own is part of the key of JAX's caches: no older trace is taken for this one.
    with entered(dataclasses.replace(scope_here(), record=record)):
        # What equinox jitted goes from the function to the lowered program in one step.
        found = getattr(jittable, "trace", jittable.lower)(*args, **kwargs)
    stage = stage_of(found)
    if stage is None:
        raise ValueError(
            f"`{caller}`: {type(program).__name__} says that it can be lowered, and what it lowers "
            f"to, {type(found).__name__}, holds no program of JAX. Pass the function that it wraps."
        )
    return stage


def _what(program: Any) -> str:
    """What was passed instead of a program, and which of its functions may be meant."""
    functions = [name for name in ("apply", "init") if callable(getattr(program, name, None))]
    meant = f", whose functions are {' and '.join(f'`.{name}`' for name in functions)}"
    return type(program).__name__ + meant * bool(functions)
