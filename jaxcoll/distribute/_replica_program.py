"""Replica functions: the context inside one, and the program that runs it on all replicas."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcoll._collectives.all_gather import all_gather
from jaxcoll._collectives.all_reduce import all_reduce
from jaxcoll._collectives.same import Claims
from jaxcoll._collectives.scope import Scope
from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import check_not_empty, is_array, refuse_tied
from jaxcoll._runtime.call import Call, InnerDeadlines
from jaxcoll._runtime.dispatch import find_group, run
from jaxcoll._runtime.executable import remember
from jaxcoll._step.claims import make_check
from jaxcoll._step.jitted_program import MISSED, JittedProgram, allow_traces
from jaxcoll._step.mesh.mesh import local_positions, make_line, no_mesh, span_processes
from jaxcoll._step.mesh.placement import place
from jaxcoll._step.mesh.world import make_worlds
from jaxcoll._step.replicated_program import ReplicaMapping
from jaxcoll.distribute._arguments import call_options, copy_near, fit_to_group
from jaxcoll.distribute._per_replica import (
    DistributedValues,
    Mirrored,
    PerReplica,
    Uneven,
    is_distributed,
)
from jaxcoll.distribute._replica_axis import (
    AXIS,
    context_in_trace,
    copies_over,
    drop_deadline,
    drop_row,
    refuse_traced,
)


class ReplicaContext:
    """The replica that runs the function of `strategy.run`; see `jc.get_replica_context()`.

    Every replica computes with its own values. A constant made inside, an array captured from
    outside and an argument that all replicas share each count once per replica: with R replicas,
    the SUM of such a value is R times the value, and its MEAN is the value itself. A gradient taken
    inside is that of this replica's own result, until it is reduced.

    The replicas lie along the mapped axis "replica", which is the `axis_name` of
    `jc.value_and_grad`, `jc.all_reduce` and `jax.lax` here. After the function has returned,
    methods that need a replica raise `RuntimeError`.
    """

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy whose `run` called the function."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run the function; a Python int."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """This replica's number, from 0; a traced int32 scalar, *varying*."""
        self._check_here()
        return jax.lax.axis_index(AXIS)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce every leaf of a pytree over the replicas, as `jc.all_reduce` does.

        `options` override those of the strategy and of `run`; `timeout_seconds` bounds the
        enclosing call of `run`. `experimental_hints` is the older name of `options`. The cotangent
        is the `all_reduce` of the replicas' cotangents with the same op.

        Returns:
          A pytree like `value`, *invariant*, which `run` returns as a `Mirrored`.
        """
        self._check_here()
        check_one_replica("all_reduce", value)
        options = call_options(options, experimental_hints)
        return all_reduce(reduce_op, value, AXIS, options=options, invariant="replicated")

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Join every leaf of a pytree with those of the other replicas, as `jc.all_gather` does.

        The arrays have the same shapes on all replicas, as in any compiled program. Gather parts of
        unequal sizes between programs, with `strategy.gather`. `options` are as in `all_reduce`.
        The cotangent is this replica's slice of the summed cotangents.

        Returns:
          A pytree like `value`, with R times the size along `axis`, *invariant*.
        """
        self._check_here()
        check_one_replica("all_gather", value)
        return all_gather(value, AXIS, axis=axis, options=options)

    def __repr__(self) -> str:
        return f"ReplicaContext(num_replicas_in_sync={self.num_replicas_in_sync})"

    def _check_here(self) -> None:
        if get_replica_context() is not self:
            raise RuntimeError(
                "This ReplicaContext was used outside the function that `strategy.run` called. "
                "Inside it, call `jc.get_replica_context()`; between programs, `strategy.reduce` "
                "or `strategy.gather`; in any other mapped function, `jc.all_reduce`."
            )


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica function that is being traced.

    Returns:
      A `ReplicaContext` inside a function that `strategy.run` calls; None elsewhere, where
      `strategy.run`, `reduce` and `gather` may be called. The error `'NoneType' object has no
      attribute 'all_reduce'` comes from a call elsewhere: use `strategy.reduce` there.

    Examples:
      >>> get_replica_context() is None
      True
    """
    return context_in_trace.value


def check_one_replica(caller: str, value: Any) -> None:
    """Refuse a value of all replicas where the value of one is expected."""
    for leaf in jax.tree.leaves(value, is_leaf=is_distributed):
        if is_distributed(leaf):
            raise ValueError(
                f"`{caller}` works on the value of one replica; it got a {type(leaf).__name__}. "
                "Pass it to `run` in `args`, not by capture: each replica then gets its own part."
            )


def check_call(caller: str, fn: Any, args: Any) -> None:
    """Refuse what cannot be called, or cached, or passed as positional arguments."""
    if not callable(fn) or not isinstance(args, tuple | list):
        raise ValueError(
            f"`{caller}` expects a function, and its arguments in a tuple, as in "
            f"`args=(batch,)`; got {type(fn).__name__} and args {type(args).__name__}."
        )
    try:
        hash(fn)
    except TypeError:
        what = f"a {type(fn).__name__} cannot be a key: it has no hash. Wrap it in a function."
        raise ValueError(f"`{caller}` caches the program of each function; {what}") from None


def run_on_replicas(
    caller: str,
    what: str,
    function: Callable[..., Any],
    arguments: tuple[Any, Any],
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
    context: ReplicaContext | None,
    *,
    as_one: bool = False,
) -> Any:
    """Call `function` once on every device, and wait for it if there is a deadline.

    The result has a distributed value for each array, or is a single one if `as_one`.
    """
    settings = (drop_deadline(options), context, as_one)
    program = replica_program(devices, function, *settings)
    with no_mesh():
        if program.call_quickly and not options.timeout_seconds:
            result = program.call_quickly(arguments)
            if result is not MISSED:
                return result
        allow_traces()
        refuse_tied(arguments, caller)
        placed = place_arguments(caller, arguments, devices)
        # A trace finds the deadlines and the claims inside, which are of this call too.
        if compares := program.trace_once(*placed) and program.claims.found:
            program = replica_program(devices, function, *settings, True)
            program.trace_once(*placed)
        call = Call(program.jitted, placed, devices, what, options, inner=program.inner)
        result = run(call)
        if compares:
            return make_check(program.claims, make_line(devices, AXIS), (AXIS,))(result, call)
        if not call.timeout_seconds and find_group(devices) is None:
            program.call_quickly = program.quick_call(arguments, placed)
        return result


class ReplicaProgram(JittedProgram):
    """A program that runs a function on every device; it takes placed arguments."""

    call_quickly: Callable[[Any], Any] | None = None  # with arguments like the last ones


_MOST_PROGRAMS = 16  # cached for one function, with different devices, options or strategies


def per_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """Cache `make(devices, function, ...)` by its arguments, for as long as `function` lives.

    A cached program must not keep the function alive, nor the weights that it closes over. So
    `make` gets a wrapper with a weak reference; the caller of the program holds the function.
    """
    made: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
    make_strongly = functools.lru_cache(maxsize=_MOST_PROGRAMS)(make)

    @functools.wraps(make)
    def look_up(devices: Any, function: Callable[..., Any], *more: Any) -> Any:
        # Every access creates a new bound method, so its programs belong to the instance.
        owner, method = function, None
        if isinstance(function, types.MethodType):
            owner, method = function.__self__, function.__func__
        try:
            programs = made.setdefault(owner, {})
        except TypeError:  # it has no weak references, or no hash
            return make_strongly(devices, function, *more)
        key = (method, devices, *more)
        if key not in programs:
            reference: Any = (weakref.WeakMethod if method else weakref.ref)(function)
            name: Any = getattr(function, "__name__", type(function).__name__)

            def weakly(*args: Any, **kwargs: Any) -> Any:
                return reference()(*args, **kwargs)

            weakly.__name__ = name
            programs[key] = make(devices, weakly, *more)
            if len(programs) > _MOST_PROGRAMS:
                del programs[next(iter(programs))]
        return programs[key]

    return look_up


@per_function
def replica_program(
    devices: tuple[jax.Device, ...],
    function: Callable[..., Any],
    options: CommunicationOptions,
    context: ReplicaContext | None,
    as_one: bool = False,
    compares: bool = False,
) -> ReplicaProgram:
    """Make the program that runs `function` on every device, as `Strategy.run` guarantees."""
    inner, claims = InnerDeadlines(), Claims(compares)
    name = getattr(function, "__name__", type(function).__name__)
    mesh = make_line(devices, AXIS)
    scope = Scope(make_worlds(mesh), options, remember, inner.ask, (AXIS,), claims)

    def program(args: Any, kwargs: Any) -> Any:
        structure = jax.tree.structure(None)  # of the result, once it is traced

        def replica(args: Any, kwargs: Any) -> Any:
            nonlocal structure
            args, kwargs = jax.tree.map(
                lambda v: drop_row(v.tree) if isinstance(v, PerReplica) else v,
                (args, kwargs),
                is_leaf=is_distributed,
            )
            result = function(*args, **kwargs)
            check_one_replica(name, result)
            leaves, structure = jax.tree.flatten(result)
            arrays = [*map(jnp.asarray, leaves)]
            # Only the trace shows which arrays vary, so each one is returned both ways.
            return arrays, [x[None] for x in arrays]

        replica.__name__ = name
        specs = jax.tree.map(
            lambda v: PartitionSpec(AXIS) if is_distributed(v) else PartitionSpec(),
            (args, kwargs),
            is_leaf=is_distributed,
        )
        out_specs = PartitionSpec(), PartitionSpec(AXIS)
        with context_in_trace(context):
            mapping = ReplicaMapping(mesh, scope, specs)
            (copies, rows), proven = mapping.call(replica, out_specs, (args, kwargs))
        assert proven is not None
        varies = [bool(along) for along in proven.varying[: len(copies)]]

        def value(places: Any) -> Any:
            differs = any(varies[k] for k in jax.tree.leaves(places))
            arrays = rows if differs else copies
            return (PerReplica if differs else Mirrored)._wrap(
                jax.tree.map(arrays.__getitem__, places)
            )

        # The arrays of an IndexedSlices are one value.
        is_value = (lambda _: True) if as_one else is_sparse
        return jax.tree.map(value, structure.unflatten(range(len(copies))), is_leaf=is_value)

    program.__name__ = name  # what messages and profiles show
    return ReplicaProgram(program, inner, claims)


def place_arguments(caller: str, tree: Any, devices: tuple[jax.Device, ...]) -> Any:
    """Place the arguments of a replica function on the devices of its program.

    All but the `PerReplica`s become global arrays, so that one program takes shared values however
    they were passed. Values that already lie there are not copied.
    """
    copies = copies_over(devices)

    def place_value(path: Any, value: Any) -> Any:
        def name() -> str:
            return f"`{caller}`: {('args', 'kwargs')[path[0].idx]}{jax.tree_util.keystr(path[1:])}"

        if isinstance(value, PerReplica):
            return _check_devices(name, value._validate(), devices)
        if isinstance(value, Mirrored):
            value = value._validate()
            # If only this process's replicas run, use its own copy, the only one that it can reach.
            inside = span_processes(value.devices) and not span_processes(devices)
            tree = copy_near(value, devices) if inside else value.tree
            return place(tree, copies)
        if isinstance(value, Tracer):
            refuse_traced(name())
        if isinstance(value, Uneven):
            raise ValueError(
                f"{name()} has parts of unequal shapes, and a program one shape for all replicas. "
                "Pad them, or use `strategy.reduce` or `strategy.gather`."
            )
        if not is_array(value):
            raise ValueError(
                f"{name()} is {value!r} ({type(value).__name__}); expected a PerReplica, a "
                "Mirrored, an array or a number. Bind anything else with `functools.partial`, only "
                "once, because each new function is compiled again."
            )
        return place(value, copies)

    values = jax.tree_util.tree_map_with_path(place_value, tree, is_leaf=is_distributed)
    leaves = jax.tree.leaves(values, is_leaf=is_distributed)
    trees = [leaf.tree for leaf in leaves if isinstance(leaf, PerReplica)]
    of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trees)
    check_not_empty(caller, of_one or leaves)
    return values


def _check_devices(
    name: Callable[[], str], value: PerReplica, devices: tuple[jax.Device, ...]
) -> DistributedValues:
    if value.devices == devices:
        return value
    if value.devices == tuple(devices[i] for i in local_positions(devices)):  # this one's share
        return fit_to_group(name(), value, devices)._make_global()
    lies, wanted = (", ".join(map(str, line)) for line in (value.devices, devices))
    raise ValueError(
        f"{name()} is a PerReplica over {lies}; the replicas are on {wanted}, in this order. Make "
        "it with `strategy.experimental_distribute_values_from_function`, or pass `devices`."
    )
