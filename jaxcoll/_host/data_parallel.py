"""Wraps a train step: places its arguments, compiles it once a shape, keeps all checks on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcoll._host.compiler_options import known_options
from jaxcoll._host.deadline import finished, prepared
from jaxcoll._host.inner_deadlines import InnerDeadlines
from jaxcoll._host.mesh import (
    abstract_mesh,
    checked_mesh,
    equal_shares,
    fitted_mesh,
    has_axes,
    no_mesh,
)
from jaxcoll._host.placement import check_concrete, check_rows, is_in_place, place, place_leaf
from jaxcoll._host.program import remember
from jaxcoll._host.shards import place_shards, specs_of
from jaxcoll._host.step_outputs import VaryingOutputs, output_specs
from jaxcoll._host.world import mesh_scope, topology_scope
from jaxcoll._plan.options import UNSET, CommunicationOptions, checked
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.topology import Topology
from jaxcoll._spmd.scope import Scope, entered
from jaxcoll._spmd.shards import is_shards


def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    batch_argnums: int | Sequence[int] = -1,
    donate_argnums: int | Sequence[int] = (),
    options: CommunicationOptions | None = None,
    varying_outputs: VaryingOutputs = "error",
) -> Any:
    """Run an ordinary step on every replica, each with its share of the batch.

    Law: the step sees its replica's rows of the batch, its own part of `Shards` wherever they
    are, and whole copies of everything else; what it returns, but for `Shards`, must be the same
    on every replica, and JAX's own `shard_map` checks, which stay on, prove it. Can be used as a
    decorator, with or without arguments.

    Args:
      step: a function or bound method of pytrees of arrays, positional or by keyword; it reduces
        with `jc.value_and_grad`, `jc.all_reduce` or `jax.lax` over `axis_name`.
      mesh: devices and axes, Auto or Explicit; None: all devices on one axis.
      axis_name: the mesh axis, or axes from outer to inner, that the batch is split over.
        Other axes of the mesh hold copies.
      batch_argnums: positions of the arguments split along their leading dimension; the rest,
        and keyword arguments, are replicated. Default: the last positional argument.
      donate_argnums: positions of the arguments whose memory may be reused for the results.
      options: defaults for the reductions inside; `timeout_seconds` bounds each call.
        Where they overlap, the compiler options that their plans need are set, for this program
        alone, as its first call finds them.
      varying_outputs: what to do with an output that differs between replicas. "error": refuse
        it and name it. "concatenate": join it along its leading dimension, in replica order,
        as for the predictions of a batch.

    Returns:
      A `DataParallel`: call it with host numpy arrays or global `jax.Array`s; it places them
      (without a copy where they are in place), compiles once for each shape and dtype, and
      returns global arrays, replicated. Cost: that of the reductions inside.

    Raises:
      ValueError: an argument is invalid, the mesh is empty, lists a device twice or lacks the
        axis; on a call, a batch that does not divide, or an output that varies.
      DeadlineExceededError: on a call, `timeout_seconds` passed.
      ReductionCorruptedError: on a call, a checksum found a wrong sum.

    Examples:
      >>> import numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("sum", (w * x).sum(), "data"))
      >>> float(step(2.0, np.arange(8.0)))
      56.0
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "axis_name": axis_name,
        "batch_argnums": _positions("batch_argnums", batch_argnums),
        "donate_argnums": _positions("donate_argnums", donate_argnums),
        "options": checked(options),
        "varying_outputs": varying_outputs,
    }
    if varying_outputs not in get_args(VaryingOutputs):
        raise ValueError(
            "`data_parallel` expects `varying_outputs` to be 'error' or 'concatenate'; "
            f"got {varying_outputs!r}."
        )
    if mesh is not None:
        checked_mesh(mesh, axis_name, "data_parallel")
    if step is None:
        return lambda decorated: DataParallel(decorated, **settings)
    if not callable(step):
        raise ValueError(f"`data_parallel` expects a function; got {type(step).__name__}.")
    return DataParallel(step, **settings)


def _positions(argument: str, value: int | Sequence[int]) -> tuple[int, ...]:
    positions = tuple(value) if isinstance(value, Sequence) else (value,)
    if not all(isinstance(p, int) and not isinstance(p, bool) for p in positions):
        raise ValueError(f"`{argument}` must be an int or a sequence of ints; got {value!r}.")
    return positions


class DataParallel:
    """A step that runs on every replica; made by `data_parallel`, called like the step."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        mesh: Mesh | None,
        axis_name: str | tuple[str, ...],
        batch_argnums: tuple[int, ...],
        donate_argnums: tuple[int, ...],
        options: CommunicationOptions,
        varying_outputs: VaryingOutputs,
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._mesh = mesh
        self._axis_name = axis_name
        self._axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        self._batch_argnums = batch_argnums
        self._donate_argnums = donate_argnums
        self._options = options
        self._varying_outputs: VaryingOutputs = varying_outputs
        self._calls = 0
        self._known: Any = None
        self._inner = InnerDeadlines()

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh it runs on; without one given, all devices at the time of the first use."""
        return checked_mesh(self._mesh, self._axis_name, "data_parallel")

    @functools.cached_property
    def _scope(self) -> Scope:
        return mesh_scope(self.mesh)

    @functools.cached_property
    def _devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.devices.flat)

    @functools.cached_property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self._axis_name))

    @functools.cached_property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def told(self) -> str:
        """The options that processes have to have in common, in words."""
        return repr(self._options.replace(timeout_seconds=UNSET))

    @functools.cached_property
    def _processes(self) -> int:
        return equal_shares(self._devices)

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The axis, or axes, that a batch is split over."""
        return self._axis_name

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the arguments whose memory may be reused."""
        return self._donate_argnums

    def call_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int | str, ...]]:
        """A call's arguments, and which of them are the batch, by position or by name."""
        batch = tuple(i % len(args) for i in self._batch_argnums if -len(args) <= i < len(args))
        return args, kwargs, batch

    @property
    def checksum(self) -> bool:
        """Whether a call listens for corrupted reductions."""
        return self._options.checksum

    @property
    def num_replicas(self) -> int:
        """Replicas that share a batch."""
        return math.prod(self.mesh.shape[a] for a in self._axes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's result on the whole batch; see `data_parallel`."""
        self._calls += 1
        own = self._options.timeout_seconds
        name = getattr(self._step, "__name__", "step")
        with no_mesh():
            args, kwargs = self._placed(args, kwargs)
            program = self._compiled(args, kwargs)
            call = prepared(
                program,
                self._inner.bound(own),
                args,
                kwargs,
                across=self._devices,
                told=self.told,
            )
            deadline = self._inner.bound(own)
            what = f"Call {self._calls} of `{name}`"
            return finished(call, deadline, what, across=self._devices, checksum=self.checksum)

    def over(self, topology: Topology, mesh: Mesh | AbstractMesh | None = None) -> DataParallel:
        """This step on a cluster that is not here: to be traced and lowered, not to be called.

        Args:
          topology: the cluster.
          mesh: its axes; None: this step's own mesh, if it fits or has only `axis_name`.

        Returns:
          A step of the same function and settings.

        Raises:
          ValueError: the mesh does not fit, or lacks an axis.
        """
        mesh = self._mesh if mesh is None else mesh
        if mesh is None or (mesh is self._mesh and set(mesh.axis_names) == set(self._axes)):
            fits = mesh is not None and mesh.size == topology.size
            mesh = mesh if fits else abstract_mesh(topology, self._axes)
        return self._twin(
            mesh=has_axes(fitted_mesh(mesh, topology), self._axes, "data_parallel"),
            _scope=topology_scope(topology),
            _processes=topology.hosts,
        )

    def on(self, mesh: Mesh) -> DataParallel:
        """This step on other devices.

        Args:
          mesh: devices and axes, `axis_name` among them.

        Returns:
          A step of the same function and settings.

        Raises:
          ValueError: the mesh lacks the axis.
        """
        return self._twin(_mesh=checked_mesh(mesh, self._axis_name, "data_parallel"))

    def _twin(self, **changed: Any) -> DataParallel:
        twin = copy.copy(self)
        for cached in ("mesh", "_scope", "_devices", "_processes", "_rows", "_whole"):
            vars(twin).pop(cached, None)
        vars(twin).update(changed, _known=None, _inner=InnerDeadlines())
        return twin

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The program for these arguments, traced and not yet lowered.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
          **kwargs: likewise.

        Returns:
          What `jax.jit(...).trace` returns.
        """
        with no_mesh():
            args, kwargs = self._placed(args, kwargs)
            return self._compiled(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, lowered: `.as_text()` shows what is requested.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
          **kwargs: likewise.

        Returns:
          What `jax.jit(...).lower` returns; `.compile().as_text()` shows what was compiled.
        """
        with no_mesh():
            args, kwargs = self._placed(args, kwargs)
            return self._compiled(args, kwargs).lower(*args, **kwargs)

    def trace_recorded(
        self, record: Callable[[Plan], None], *args: Any, **kwargs: Any
    ) -> jax.stages.Traced:
        """Like `trace`, made for the purpose, so that it tells each plan to `record`."""
        with no_mesh():
            args, kwargs = self._placed(args, kwargs)
            return self._jitted(record, args, kwargs).trace(*args, **kwargs)

    def plans(self, *args: Any, **kwargs: Any) -> tuple[Plan, ...]:
        """The plan of every reduction that the step makes with these arguments, in order.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
          **kwargs: likewise.

        Returns:
          The plans that are carried out, from a trace made for the purpose; nothing runs.
        """
        plans: list[Plan] = []
        program = functools.partial(self._program, plans.append)
        with no_mesh():
            args, kwargs = self._placed(args, kwargs)
            jax.eval_shape(program, *args, **kwargs)
        return tuple(plans)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The jitted program, which its first arguments decide on."""
        if self._known is None:
            self._known = self._jitted(remember, args, kwargs)
        return self._known

    def _jitted(
        self, record: Callable[[Plan], None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The program, with the compiler options that its plans need with these arguments.

        JAX keeps the trace that finds them, and compiles from it.
        """
        wanted: dict[str, Any] = {}

        def noted(plan: Plan) -> None:
            wanted.update(plan.compiler_options())
            record(plan)

        program = functools.partial(self._program, noted)
        functools.update_wrapper(program, self._step, updated=())
        jitted = functools.partial(jax.jit, program, donate_argnums=self._donate_argnums)
        bare = jitted()
        bare.trace(*args, **kwargs)
        if not wanted:
            return bare
        here = isinstance(self.mesh, Mesh)
        known = known_options(wanted, self.mesh.devices.flat[0]) if here else wanted
        return jitted(compiler_options=known)

    def _program(self, record: Callable[[Plan], None], *args: Any, **kwargs: Any) -> Any:
        """What is traced: the step inside a checked `shard_map` over the whole mesh."""
        batch = PartitionSpec(self._axis_name)
        split = {i % len(args) for i in self._batch_argnums} if args else set()
        specs = tuple(batch if i in split else specs_of(args[i]) for i in range(len(args)))
        mapped = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(specs, specs_of(kwargs)), check_vma=True
        )
        scope = dataclasses.replace(
            self._scope, options=self._options, record=record, deadline=self._inner.ask
        )
        # One trace of the step serves both passes: the first only asks how its outputs vary.
        step = jax.jit(self._step, inline=True)
        found: list[Any] = []

        def ask(args: Any, kwargs: Any) -> None:
            results = step(*args, **kwargs)
            # The order of the rows is that of the batch: `axis_name`'s, before other axes.
            order = tuple(dict.fromkeys((*self._axes, *self.mesh.axis_names)))
            found.append(output_specs(results, order, self._varying_outputs))

        with entered(scope):
            jax.eval_shape(mapped(ask, out_specs=None), args, kwargs)
            run = mapped(lambda args, kwargs: step(*args, **kwargs), out_specs=found[0])
            return run(args, kwargs)

    def _placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for i in (*self._batch_argnums, *self._donate_argnums):
            if not -len(args) <= i < len(args):
                raise ValueError(
                    f"`data_parallel`: argument {i} is named in `batch_argnums` or "
                    f"`donate_argnums`, but the step was called with {len(args)} positional "
                    "arguments."
                )
        check_concrete(args, kwargs)
        split = {i % len(args) for i in self._batch_argnums}
        for i in sorted(split):
            check_rows(args[i], f"args[{i}]", self.num_replicas, self._processes, self._axis_name)
        placed = tuple(
            place(arg, self._rows) if i in split else self._replicate(arg)
            for i, arg in enumerate(args)
        )
        return placed, self._replicate(kwargs)

    def _replicate(self, tree: Any) -> Any:
        """Copies of everything on every device, but for `Shards`: each device has its own."""
        if is_in_place(tree, self._whole):
            return tree
        return jax.tree.map(
            lambda x: place_shards(x, self.mesh) if is_shards(x) else place_leaf(x, self._whole),
            tree,
            is_leaf=is_shards,
        )
