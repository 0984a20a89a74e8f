"""A step: places its arguments, compiles it once per shape, checks its outputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcoll._collectives.same import Claims
from jaxcoll._collectives.scope import Scope
from jaxcoll._collectives.shards import Shards
from jaxcoll._compat.settings import boundary, drop_unknown_options
from jaxcoll._gradients.batch import Call, Signature, Slot, check_shares
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._runtime import call as dispatched
from jaxcoll._runtime.dispatch import find_group, run
from jaxcoll._runtime.executable import remember
from jaxcoll._step.bound_step import bind_step
from jaxcoll._step.claims import make_check
from jaxcoll._step.jitted_program import MISSED, JittedProgram, allow_traces
from jaxcoll._step.mesh.mesh import ambient_mesh, axis_names, check_mesh, equal_shares, no_mesh
from jaxcoll._step.mesh.placement import make_specs
from jaxcoll._step.mesh.world import Worlds, make_worlds
from jaxcoll._step.placed_arguments import Arguments
from jaxcoll._step.replicated_program import ReplicaMapping, call_step

_FLAGS = """\
`data_parallel`: while a step is traced, all of its arguments are arrays with unknown values, even \
numbers and flags such as `train=True`. If the step branches on an argument, bind it before you \
wrap the step, `jc.data_parallel(functools.partial(step, train=True))`, with one wrapped step for \
each value; or branch in the program, by `jnp.where` or `lax.cond`."""


@dataclasses.dataclass(eq=False, repr=False)
class DataParallel:
    """A step that runs on every replica; made by `data_parallel` and called like the step.

    Attributes:
      signature: finds the batch among the arguments of a call.
    """

    _step: Callable[..., Any]
    _mesh: Mesh | None
    _axis_name: str | tuple[str, ...]
    _batch_argnums: tuple[Slot, ...] | None
    _donated: tuple[Slot, ...]
    _options: CommunicationOptions
    _varying_outputs: Any
    _check_vma: bool

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self._step, updated=())
        self._axes = axis_names(self._axis_name)
        self.signature = Signature(self._step, self._batch_argnums)
        self._calls = 0
        self._programs: dict[tuple[Slot, ...], JittedProgram] = {}
        # How to make a call like the last, and the names of its arguments by keyword
        self._quick: tuple[Any, tuple[str, ...]] = None, ()
        self._on_ambient: dict[Mesh, DataParallel] = {}
        self._inner = dispatched.InnerDeadlines()

    def __repr__(self) -> str:
        return f"DataParallel({self.signature}, axis_name={self._axis_name!r})"

    @property
    def mesh(self) -> Mesh:
        """The mesh it runs on. By default that of `jax.set_mesh`, or one of all devices."""
        return self._choose_mesh()._fixed_mesh

    @property
    def chosen_mesh(self) -> Mesh | AbstractMesh | None:
        """The `mesh` argument, or the mesh of `jax.set_mesh` if it has the axes; else None."""
        return ambient_mesh(self._axes) if self._mesh is None else self._mesh

    @functools.cached_property
    def _fixed_mesh(self) -> Mesh:
        return check_mesh(self._mesh, self._axis_name, "data_parallel")

    def _choose_mesh(self) -> DataParallel:
        """Choose the step on the mesh of `jax.set_mesh`, if this one has no mesh of its own."""
        mesh = self.chosen_mesh if self._mesh is None else None
        if not isinstance(mesh, Mesh):  # abstract in a trace, where traced arguments are refused
            return self
        if mesh not in self._on_ambient:
            self._on_ambient[mesh] = self.on(mesh)
        return self._on_ambient[mesh]

    @functools.cached_property
    def _worlds(self) -> Worlds:
        return make_worlds(self._fixed_mesh)

    @functools.cached_property
    def _devices(self) -> tuple[jax.Device, ...]:
        return tuple(self._fixed_mesh.devices.flat)

    @functools.cached_property
    def _arguments(self) -> Arguments:
        return Arguments(
            self.signature, self._fixed_mesh, self._axis_name, self._processes, self.donate_argnums
        )

    @functools.cached_property
    def _processes(self) -> int:
        return equal_shares(self._devices)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return this step as a method; see `bind_step`."""
        instance = owner if isinstance(self._step, classmethod) else instance
        return self if instance is None else bind_step(self, instance, self._bind)

    def _bind(self, instance: Any) -> DataParallel:
        step: Any = self._step
        of = (None, instance) if isinstance(step, classmethod) else (instance,)
        return self._copy_for(step.__get__(*of))

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The axis or axes that the batch is split over."""
        return self._axis_name

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the arguments whose memory may be reused."""
        return self.signature.positions(self._donated)

    @property
    def options(self) -> CommunicationOptions:
        """Defaults for the reductions inside."""
        return self._options

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share a batch."""
        return math.prod(self.mesh.shape[a] for a in self._axes)

    @boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's result on the whole batch; see `data_parallel`."""
        if jax.sharding.get_abstract_mesh().empty:
            return self._call(args, kwargs)
        step = self._choose_mesh()
        with no_mesh():
            return step._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Most calls are like the one before, with nothing to place, to check or to agree on.
        call_quickly, names = self._quick
        if call_quickly is not None and names == (*kwargs,):
            result = call_quickly((*args, *kwargs.values()))
            if result is not MISSED:
                self._calls += 1
                return result
        allow_traces()
        program, call, check = self._prepare(args, kwargs)
        result = run(call)
        if check is not None:
            return check(result, call)
        # Only the names tell the order: one array may be passed for two parameters.
        in_order = self.signature.are_in_order(len(args), kwargs)
        # A deadline needs another thread, and several processes agree on each call.
        alone = not call.timeout_seconds and find_group(self._devices) is None
        quick = program.quick_call((*args, *kwargs.values()), tuple(call.args))
        self._quick = (quick if alone and in_order and not call.kwargs else None), (*kwargs,)
        return result

    def prepare(
        self, /, *args: Any, **kwargs: Any
    ) -> tuple[dispatched.Call, Callable[[Any, dispatched.Call], Any] | None]:
        """Return the call for these arguments, and a check of its result, if one is due."""
        return self._prepare(args, kwargs)[1:]

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        self._calls += 1
        name = f"Call {self._calls} of `{getattr(self._step, '__name__', 'step')}`"
        call = self._arguments.place(self._arguments.check(args, kwargs))
        program, check = self._program_for(call), None
        # `jc.same` is compared in the first call of each shape, by a program that only this call
        # runs.
        if program.claims.found and program.trace_once(*call.args, **call.kwargs):
            program = self._jit(remember, call, Claims(compares=True))
            check = make_check(program.claims, self._fixed_mesh, self._axes)
        of_call = program.jitted, call.args, self._devices, name, self._options, call.kwargs
        names = self.signature.name
        made = dispatched.Call(*of_call, rows=True, inner=self._inner, name_of=names)
        return program, made, check

    def over(self, mesh: AbstractMesh, worlds: Worlds, processes: int) -> DataParallel:
        """Return this step for other devices, to be traced and lowered but not called.

        Args:
          mesh: a mesh with the axes of `axis_name`.
          worlds: the worlds of the reductions inside.
          processes: the number of processes, each with equally many devices.

        Returns:
          A step with the same function and settings.
        """
        return self._copy_with(_mesh=mesh, _fixed_mesh=mesh, _worlds=worlds, _processes=processes)

    def on(self, mesh: Mesh) -> DataParallel:
        """Return this step on other devices.

        Args:
          mesh: devices and axes, including `axis_name`.

        Returns:
          A step with the same function and settings.

        Raises:
          ValueError: the mesh lacks the axis.
        """
        return self._copy_with(_mesh=check_mesh(mesh, self._axis_name, "data_parallel"))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Copy the step, such as a method with its instance, but neither programs nor devices."""
        return self._copy_for(copy.deepcopy(self._step, memo))

    def _copy_for(self, step: Callable[..., Any]) -> DataParallel:
        signature = Signature(step, self._batch_argnums)
        return self._copy_with(_step=step, signature=signature, __wrapped__=step)

    def _copy_with(self, **changed: Any) -> DataParallel:
        step = copy.copy(self)
        # Properties that depend on the mesh are computed anew, unless they are in `changed`.
        for cached in ("_fixed_mesh", "_worlds", "_devices", "_processes", "_arguments"):
            vars(step).pop(cached, None)
        inner = dispatched.InnerDeadlines()
        vars(step).update(changed, _programs={}, _quick=(None, ()), _on_ambient={}, _inner=inner)
        return step

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the program for these arguments.

        Args:
          *args: arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: likewise.

        Returns:
          A `jax.stages.Traced`, like `jax.jit(...).trace`.
        """
        step = self._choose_mesh()
        with no_mesh():
            call = step._shapes(args, kwargs)
            return step._program_for(call).jitted.trace(*call.args, **call.kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the program for these arguments: `.as_text()` shows what it requests.

        Args:
          *args: arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: likewise.

        Returns:
          A `jax.stages.Lowered`; its `.compile().as_text()` shows the compiled program.
        """
        traced = self.trace(*args, **kwargs)
        with no_mesh():
            return traced.lower()

    def trace_recorded(
        self, record: Callable[[CollectivePlan], None], /, *args: Any, **kwargs: Any
    ) -> jax.stages.Traced:
        """Trace anew, like `trace`, and call `record` with the plan of each reduction."""
        step = self._choose_mesh()
        with no_mesh():
            call = step._shapes(args, kwargs)
            return step._jit(record, call, Claims()).jitted.trace(*call.args, **call.kwargs)

    def _program_for(self, call: Call) -> JittedProgram:
        if call.batch not in self._programs:
            self._programs[call.batch] = self._jit(remember, call, Claims())
        return self._programs[call.batch]

    def _jit(
        self, record: Callable[[CollectivePlan], None], call: Call, claims: Claims
    ) -> JittedProgram:
        """Compile with the options that the plans of a trace for these arguments need.

        A trace finds these options. JAX caches the trace and compiles from it.
        """
        wanted: dict[str, Any] = {}

        def note(plan: CollectivePlan) -> None:
            wanted.update(plan.compiler_options())
            record(plan)

        function = functools.partial(self._program, note, call.batch, claims)
        functools.update_wrapper(function, self._step, updated=())
        donated = self.donate_argnums
        program = JittedProgram(function, self._inner, claims, donate_argnums=donated)
        program.jitted.trace(*call.args, **call.kwargs)
        if wanted:
            mesh = self._fixed_mesh
            has_devices = isinstance(mesh, Mesh)
            known = drop_unknown_options(wanted, mesh.devices.flat[0]) if has_devices else wanted
            program.add_options(compiler_options=known)
        return program

    def _program(
        self,
        record: Callable[[CollectivePlan], None],
        batch: tuple[Slot, ...],
        claims: Claims,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the step on every device of the mesh; this function is traced."""
        rows = PartitionSpec(self._axis_name)
        in_specs = (
            *(rows if i in batch else make_specs(arg) for i, arg in enumerate(args)),
            {name: rows if name in batch else make_specs(arg) for name, arg in kwargs.items()},
        )
        scope = Scope(self._worlds, self._options, record, self._inner.ask, self._axes, claims)

        @functools.wraps(self._step, updated=())
        def step(*args: Any, **kwargs: Any) -> Any:
            result = self._step(*args, **kwargs)
            check_shares(
                lambda args, kwargs: self._step(*args, **kwargs),
                Call(args, kwargs, batch),
                self.num_replicas,
                self.signature.name,
                "data_parallel",
            )
            return result

        try:
            return call_step(
                ReplicaMapping(self._fixed_mesh, scope, in_specs, self._check_vma),
                step,
                self._varying_outputs,
                (*args, kwargs),
                [*map(self.signature.name, range(len(args)))],
            )
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(_FLAGS)
            raise
        except (TypeError, ValueError) as error:
            if str(Shards) in str(error):  # JAX's message about trees that differ
                error.add_note(_SHARDS_UPDATED)
            raise

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return self._arguments.shapes(self._arguments.check(args, kwargs))


_SHARDS_UPDATED = """\
The step combines `Shards`, such as gradients with `scatter=True`, and a whole tree, such as an \
optimizer's state. Keep the state in shards too: \
`optimizer = jc.sharded_optimizer(optimizer, "data")`."""
