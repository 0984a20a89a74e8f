"""The texts of a program: what it requests, and what the compiler makes of it. Nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._host.data_parallel import DataParallel
from jaxcoll._host.mesh import given_mesh, line_of, takes_mesh
from jaxcoll._host.terms import terms_here
from jaxcoll._host.world import mesh_world, scope_here
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.terms import Terms
from jaxcoll._spmd.in_loops import Repeated, repeated_reductions
from jaxcoll._spmd.scope import entered


@dataclasses.dataclass(frozen=True)
class Texts:
    """What is known of a program before it runs.

    Attributes:
      compiled: HLO.
      requested: StableHLO with its lines of Python; None if there is none any more.
      plans: of the reductions that were traced for it.
      where: what it was compiled for; "" if for the devices that are here.
      terms: what those devices cost; None if that is not known.
      repeated: reductions that stand in a loop which only adds up what they return; of a program
        that was lowered or compiled already, and of `jax.pmap`'s, nobody has looked.
    """

    compiled: str
    requested: str | None = None
    plans: tuple[Plan, ...] = ()
    where: str = ""
    terms: Terms | None = None
    repeated: tuple[Repeated, ...] = ()


def texts_of(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: str) -> Texts:
    """Trace, lower and compile what is not compiled yet.

    Args:
      program: a function, one that `jax.jit` or `jax.pmap` returned, a `data_parallel` step; or,
        without arguments, what `.lower` or `.compile` returned.
      args: arrays, or `jax.ShapeDtypeStruct`s in their place.
      kwargs: likewise.
      caller: who is named in a message.

    Returns:
      The texts.

    Raises:
      ValueError: it is none of these, or arguments came with what has them already.
    """
    if isinstance(program, jax.stages.Lowered | jax.stages.Compiled):
        if args or kwargs:
            raise ValueError(
                f"`{caller}` got arguments for a program that was lowered with its own; pass the "
                "function and its arguments, or the program alone."
            )
        if isinstance(program, jax.stages.Compiled):
            return Texts(program.as_text() or "", terms=_terms())
        requested = program.as_text(debug_info=True)
        return Texts(program.compile().as_text() or "", requested, terms=_terms())
    if callable(program) and takes_mesh(program, kwargs):
        program = given_mesh(program, line_of(jax.devices(), "data"))
    plans: list[Plan] = []
    traced = _traced(program, args, kwargs, plans.append, caller)
    is_traced = isinstance(traced, jax.stages.Traced)
    lowered = traced.lower() if is_traced else traced
    return Texts(
        lowered.compile().as_text() or "",
        lowered.as_text(debug_info=True),
        tuple(plans),
        terms=_terms(),
        repeated=repeated_reductions(traced.jaxpr) if is_traced else (),
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
) -> jax.stages.Traced | jax.stages.Lowered:
    """The program traced anew, so that every reduction in it says its plan.

    Of what `jax.pmap` returned there is no step between the function and the lowered program.

    Raises:
      ValueError: it is no function.
    """
    if isinstance(program, DataParallel):
        return program.trace_recorded(record, *args, **kwargs)
    if not callable(program):
        raise ValueError(
            f"`{caller}` expects a function and its arguments, a `data_parallel` step, what "
            f"`.lower` or `.compile` returned, or HLO text; got {type(program).__name__}."
        )
    jitted: Any = program if hasattr(program, "lower") else jax.jit(program)
    # A scope of its own is part of the key of JAX's caches: no older trace is taken for this one.
    with entered(dataclasses.replace(scope_here(), record=record)):
        trace = getattr(jitted, "trace", jitted.lower)
        return trace(*args, **kwargs)
