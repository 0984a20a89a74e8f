"""A user's function, traced for a cluster that is not here: its mesh, but not its devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcoll._mesh.mesh import abstract_mesh, fitted_mesh, given_mesh, no_mesh, takes_mesh
from jaxcoll._mesh.placement import shape_of
from jaxcoll._mesh.world import topology_scope
from jaxcoll._plan.cost.clusters import Topology
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.scope import entered
from jaxcoll._step.data_parallel import DataParallel
from jaxcoll._step.unwrap import called, jitted, stage_of

_PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")


def traced_over(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    topology: Topology,
    mesh: Mesh | AbstractMesh | None,
    record: Callable[[Plan], None],
) -> jax.stages.Traced:
    """Trace `fun` as a program for `topology`.

    Law: nothing is placed, and no device is asked for but those that `fun` itself names.

    It is a `jc.data_parallel` step; a function that takes a `mesh`; or any other function, jitted
    or not, which uses the mesh of `jax.set_mesh` or one of as many devices. Arguments may be
    static. Without a `mesh` the one that `fun` has counts, if it fits or has one axis only.
    """
    fun, args, kwargs = called(fun, args, kwargs)
    if isinstance(fun, DataParallel):
        shapes, named = jax.tree.map(shape_of, (args, kwargs))
        return fun.over(topology, mesh).trace_recorded(record, *shapes, **named)
    context = jax.sharding.get_abstract_mesh()
    if takes_mesh(fun, kwargs):
        over = abstract_mesh(topology, ("data",)) if mesh is None else fitted_mesh(mesh, topology)
        return traced_over(given_mesh(fun, over), args, kwargs, topology, over, record)
    if mesh is None and not context.empty and context.size != topology.size:
        mesh = context
    over = None if mesh is None else fitted_mesh(mesh, topology)
    shapes, named = jax.tree.map(functools.partial(_as_argument, mesh=over), (args, kwargs))
    # What has no `trace` is a plain function, or jitted by another library.
    program: Any = fun
    if not hasattr(fun, "trace"):
        program, shapes, named = jitted(fun, shapes, named)
    scope = dataclasses.replace(topology_scope(topology), record=record)
    with contextlib.ExitStack() as around:
        if over is not None:  # whatever mesh, of another size perhaps, is there now
            around.enter_context(no_mesh())
            around.enter_context(jax.sharding.use_abstract_mesh(over))
        around.enter_context(entered(scope))
        traced = stage_of(program.trace(*shapes, **named))
    assert isinstance(traced, jax.stages.Traced)
    return traced


def lowered_over(traced: jax.stages.Traced, topology: Topology) -> str:
    """The text of the requested program, with source lines."""
    try:
        with no_mesh():
            lowered = traced.lower(lowering_platforms=(topology.lowers_as,))
    except ValueError as error:
        if "different from the lowering platform" in str(error):
            error.add_note(
                "jaxcoll: what calls back into Python (`jax.debug.print`, `jax.pure_callback`) "
                f"cannot be lowered for {topology.name!r} here; leave it out of what is inspected."
            )
        raise
    text = lowered.as_text(debug_info=True)
    found = _PARTITIONS.search(text)
    size = int(found[1]) if found else 1
    if size != topology.size:
        raise ValueError(
            f"The program runs on {size} of the {topology.size} devices of {topology}. A mesh in "
            "it that was made of this machine's devices must have as many; or let the topology "
            "make it: pass a `jc.data_parallel` step, a function that takes `mesh`, or the "
            "argument `mesh=jax.sharding.AbstractMesh(sizes, names)`, under which the function "
            "is traced as under `jax.set_mesh`."
        )
    return text


def _as_argument(x: Any, mesh: AbstractMesh | None) -> Any:
    """The type of an array, sharded as before wherever that has a meaning on the topology."""
    if isinstance(x, bool | int | float | complex):
        return x  # it may be static
    shape, sharding = shape_of(x), getattr(x, "sharding", None)
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return x
    if not isinstance(sharding, NamedSharding):
        return shape if mesh is None else shape.update(sharding=_open(mesh, len(shape.shape)))
    if mesh is not None and sharding.mesh.axis_names == mesh.axis_names:
        return shape.update(sharding=NamedSharding(mesh, sharding.spec))
    return shape.update(sharding=sharding)


def _open(mesh: AbstractMesh, rank: int) -> NamedSharding:
    """The sharding of an argument that has none: the compiler's choice, unless types say it."""
    free = all(kind == AxisType.Auto for kind in mesh.axis_types)
    return NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (rank * free)))
