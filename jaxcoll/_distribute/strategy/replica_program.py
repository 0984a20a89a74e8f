"""A function of one replica, made one compiled program for all of them."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcoll import _compat
from jaxcoll._dispatch.call import Call, InnerDeadlines
from jaxcoll._dispatch.dispatch import run
from jaxcoll._distribute.strategy.replica_context import ReplicaContext, check_own, context_in_trace
from jaxcoll._distribute.values.destinations import copy_near
from jaxcoll._distribute.values.parts import Uneven, of_all
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica, is_distributed
from jaxcoll._distribute.values.replica_axis import AXIS, copies_over
from jaxcoll._jaxpr.replication import VARIES, varying_outputs
from jaxcoll._jaxpr.summed_again import check_sums
from jaxcoll._mesh.mesh import line_of, no_mesh, of_this_process, span_processes
from jaxcoll._mesh.placement import InPlace, is_array, place, viewed
from jaxcoll._mesh.world import mesh_scope
from jaxcoll._plan.options import UNSET, CommunicationOptions
from jaxcoll._spmd.scope import entered
from jaxcoll._spmd.sparse import is_sparse


def run_on_replicas(
    caller: str,
    what: str,
    function: Callable[..., Any],
    arguments: tuple[Any, Any],
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
    context: ReplicaContext | None,
) -> Any:
    """Call `function` once on every device, and wait for it if there is a deadline."""
    carried = options.replace(timeout_seconds=UNSET)
    program, inner = replica_program(devices, function, carried, context)
    with no_mesh():
        placed = _ready(caller, program, inner, arguments, devices)
        return run(Call(program, placed, devices, what, options, inner=inner))


_last: weakref.WeakKeyDictionary[Any, tuple[InPlace | None, Any, Any]] = weakref.WeakKeyDictionary()
"""Of each program the arguments of its last call, the structure they got, and JAX's settings."""


def _ready(
    caller: str,
    program: Any,
    inner: InnerDeadlines,
    arguments: tuple[Any, Any],
    devices: tuple[jax.Device, ...],
) -> Any:
    """The arguments as their program wants them; like those of the last call, they are so."""
    leaves, tree = jax.tree.flatten(arguments)
    settings = _compat.configuration()
    last, structure, before = _last.get(program, (None, None, None))
    if last is not None and settings == before and last.is_like(leaves, tree):
        return structure.unflatten(leaves)
    placed = placed_arguments(caller, arguments, devices)
    # A trace finds the deadlines inside, so shapes are traced before their first call.
    inner.traced(program, placed)
    found, structure = jax.tree.flatten(placed)
    if len(found) == len(leaves) and all(a is b for a, b in zip(found, leaves, strict=True)):
        _last[program] = InPlace.of(leaves, tree), structure, settings
    return placed


@functools.lru_cache(maxsize=256)
def replica_program(
    devices: tuple[jax.Device, ...],
    function: Callable[..., Any],
    options: CommunicationOptions,
    context: ReplicaContext | None,
) -> tuple[Any, InnerDeadlines]:
    """The program that runs `function` on every device, compiled once for each shape.

    Law: as of `Strategy.run`. Beside the jitted program of placed arguments are the deadlines that
    its traces ask for.
    """
    inner = InnerDeadlines()
    name = getattr(function, "__name__", type(function).__name__)
    mesh = line_of(devices, AXIS)
    scope = dataclasses.replace(
        mesh_scope(mesh), options=options, deadline=inner.ask, marked=frozenset({AXIS})
    )

    def one(args: Any, kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(
            lambda v: v.local(v.tree) if isinstance(v, PerReplica) else v,
            (args, kwargs),
            is_leaf=is_distributed,
        )
        result = function(*args, **kwargs)
        check_own(name, result)
        return result

    def program(args: Any, kwargs: Any) -> Any:
        specs = jax.tree.map(
            lambda v: v.spec if is_distributed(v) else PartitionSpec(),
            (args, kwargs),
            is_leaf=is_distributed,
        )
        # Types (check_vma) would turn a gradient that is taken inside into the sum over all
        # replicas, and make a reduction of it wrong; see `replication`.
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=False)
        # One trace of the function serves both passes: the first only asks what varies.
        traced = jax.jit(one, inline=True)
        varies: list[Any] = []
        with entered(scope), context_in_trace(context):
            jax.eval_shape(
                mapped(
                    lambda *arguments: varies.append(_varying(traced, arguments, mesh.size)),
                    out_specs=None,
                ),
                args,
                kwargs,
            )
            run = mapped(
                lambda *arguments: jax.tree.map(
                    lambda x, v: x[None] if v else x, traced(*arguments), varies[0]
                ),
                out_specs=jax.tree.map(lambda v: PartitionSpec(*[AXIS] * v), varies[0]),
            )
            return jax.tree.map(
                lambda x, v: (PerReplica if any(jax.tree.leaves(v)) else Mirrored).of(x),
                run(args, kwargs),
                varies[0],
                is_leaf=is_sparse,
            )

    one.__name__ = program.__name__ = name  # what messages and profiles show
    return jax.jit(program), inner


def placed_arguments(caller: str, tree: Any, devices: tuple[jax.Device, ...]) -> Any:
    """The arguments of a replica function where its program wants them.

    Global arrays are in the place of all but the `PerReplica`s, so that shared values have one
    type however they were passed; values that are in place are not copied.
    """

    def placed(path: Any, value: Any) -> Any:
        def name() -> str:
            return f"`{caller}`: {('args', 'kwargs')[path[0].idx]}{jax.tree_util.keystr(path[1:])}"

        if isinstance(value, PerReplica):
            return _over(name, value.settled(), devices)
        if isinstance(value, Mirrored):
            value = value.settled()
            # Where this process's replicas alone run, its own copy is the one it can reach.
            inside = span_processes(value.devices) and not span_processes(devices)
            tree = copy_near(value, devices) if inside else value.tree
            return jax.tree.map(lambda x: _shared(x, devices), tree)
        if isinstance(value, Tracer):
            raise ValueError(
                f"{name()} is being traced. Call `run` between programs, not inside one; what it "
                "runs is compiled already."
            )
        if isinstance(value, Uneven):
            raise ValueError(
                f"{name()} has parts of unequal shapes, and one compiled program has one shape for "
                "all. Pad them to equal ones, or use `strategy.reduce` or `strategy.gather`."
            )
        if not is_array(value):
            raise ValueError(
                f"{name()} is {value!r} ({type(value).__name__}); expected a PerReplica, a "
                "Mirrored, an array or a number, or a pytree of these. Bind anything else to the "
                "function with `functools.partial`, once, so that it is not compiled anew on each "
                "call."
            )
        return _shared(value, devices)

    return jax.tree_util.tree_map_with_path(placed, tree, is_leaf=is_distributed)


def _shared(value: Any, devices: tuple[jax.Device, ...]) -> jax.Array:
    """A copy on every device, typed in one way so that one program takes all there are."""
    copies = copies_over(devices)
    # The same devices in words of another mesh would be another type, and compile again.
    array = place(value, copies)
    return array if array.sharding == copies else viewed(array, copies)


def _over(
    name: Callable[[], str], value: PerReplica, devices: tuple[jax.Device, ...]
) -> PerReplica | Mirrored:
    if value.devices == devices:
        return value
    if value.devices == tuple(devices[i] for i in of_this_process(devices)):
        return of_all(name(), value, devices)  # this process's share of what runs over several
    raise ValueError(
        f"{name()} is a PerReplica over {', '.join(map(str, value.devices))}; the replicas are "
        f"on {', '.join(map(str, devices))}, in this order. Make it with "
        "`strategy.experimental_distribute_values_from_function`, or pass `devices`."
    )


def _varying(traced: Any, arguments: Any, replicas: int) -> Any:
    """In the structure of the function's result, whether each array may vary."""
    inputs = [
        isinstance(value, PerReplica)
        for value in jax.tree.leaves(arguments, is_leaf=is_distributed)
        for _ in jax.tree.leaves(value)
    ]
    program = traced.trace(*arguments)  # whose equations keep their lines of Python
    jaxpr, shapes = program.jaxpr, program.out_info
    check_sums(jaxpr, {AXIS: replicas})
    found = varying_outputs(jaxpr, AXIS, inputs, replicas)
    varying = [bool(fact & VARIES) for fact in found]
    outputs = jax.tree.unflatten(jax.tree.structure(shapes), varying)

    def as_one(node: Any) -> Any:  # the arrays of an IndexedSlices are one value
        return jax.tree.map(lambda _: any(jax.tree.leaves(node)), node)

    return jax.tree.map(as_one, outputs, is_leaf=is_sparse)
