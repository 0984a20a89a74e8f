"""Wraps a train step: places its arguments, compiles it once a shape, proves what it returns."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcoll._compat.settings import boundary, known_options
from jaxcoll._dispatch import call as dispatched
from jaxcoll._dispatch.dispatch import run
from jaxcoll._dispatch.executable import remember
from jaxcoll._mesh.mesh import ambient_mesh, axis_names, checked_mesh, equal_shares, no_mesh
from jaxcoll._mesh.placement import specs_of
from jaxcoll._mesh.world import Worlds, worlds_of
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._spmd.check_replicas import Claims
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.shards import Shards
from jaxcoll._step.arguments import FLAGS, Call, Signature, Slot, bound_step, slots
from jaxcoll._step.claims import are_new as claims_are_new
from jaxcoll._step.claims import checked as checked_claims
from jaxcoll._step.placed_arguments import Arguments
from jaxcoll._step.replicated_program import VaryingOutputs, checked_rule, stepped


def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    batch_argnums: int | str | Sequence[int | str] | None = None,
    donate_argnums: int | str | Sequence[int | str] = (),
    options: CommunicationOptions | None = None,
    varying_outputs: VaryingOutputs | Any = "error",
    check_vma: bool = False,
) -> Any:
    """Run an ordinary step on every replica, each with its share of the batch.

    The step means what `jax.pmap` means: every value in it is one replica's own, `jax.grad` is the
    gradient of this replica's loss, and what it returns must be the same on every replica, which
    is proven from the traced program before it runs. The step sees its replica's rows of the
    batch, its own part of `Shards` wherever they are, and whole copies of everything else. Can be
    used as a decorator, with or without arguments, on functions and on methods of a class.

    Over several processes an array of the host (numpy, or a `jax.Array` of this process alone) is
    this process's share: its rows of the batch, and the whole value of everything else. In one
    process it is the whole batch. The first call compares across processes, by digests: state
    that differs is an error, and rows that are the same everywhere are a warning.

    Args:
      step: a function or method of pytrees of arrays, positional or by keyword; it reduces with
        `jc.grad`, `jc.value_and_grad`, `jc.pmean` or `jax.lax` over `axis_name`. What it
        reads of `self` or a closure is a constant of the program, as with `jax.jit`: a later
        `self.lr = ...` changes nothing. What changes is an argument.
      mesh: devices and axes; None: those of `jax.set_mesh` around a call, if they have the axis;
        else all devices on one axis.
      axis_name: the mesh axis, or axes from outer to inner, that the batch is split over, and that
        reductions in the step are over unless they name others. Other axes of the mesh are left
        to the compiler, which splits the work along them as arrays lie, and have no name inside;
        beside them leaves are summed one by one. Those of type Explicit hold copies.
      batch_argnums: positions in the step's signature, or names, of the arguments split along
        their leading dimension, however they are passed; the rest is whole on every replica. A
        step of two parameters splits the second, one of a single parameter that one (parameters
        with a default do not count); of any other step the batch must be named.
      donate_argnums: positions or names of the arguments whose memory may be reused for the
        results. An array that is passed twice is given away once, and copied for its other places.
      options: defaults for the reductions inside; `timeout_seconds` bounds each call.
        Where they overlap, the compiler options that their plans need are set, for this program
        alone, as its first call finds them.
      varying_outputs: what to do with an output that differs between replicas. "error": refuse
        it and name it. "concatenate": join the rows of every array along its leading dimension,
        in replica order, as for the predictions of a batch; one that is the same everywhere
        gives its rows once for each replica, and only scalars are returned as they are. Or a
        tree of these words, one for each output or part of the output.
      check_vma: as in `jax.shard_map`. True hands the step to JAX's types, as a `shard_map` of your
        own would: nothing is proven here, and a gradient has their meaning.

    Returns:
      A `DataParallel`: call it with host numpy arrays or global `jax.Array`s; it places them
      (without a copy where they are in place), compiles once for each shape and dtype, and
      returns global arrays, replicated. Cost: that of the reductions inside.

    Raises:
      ValueError: an argument is invalid, the mesh is empty, lists a device twice or lacks the
        axis; on a call, the batch is not named or does not divide, or has unequal numbers of
        rows that would broadcast on one replica alone; an argument that is not an array
        of numbers or is deleted; an output that varies; or a reduction that would hang or mix
        values, such as one in a branch that each replica chooses for itself.
      AlreadyReducedError: on a call, `Shards` are reduced again.
      ReplicaDivergenceError: on a first call, processes pass different state, or replicas hold
        different values where `jc.same` was called.
      DeadlineExceededError: on a call, `timeout_seconds` passed.

    Warns:
      SameRowsWarning: on a first call, all processes pass the same rows.
      RepeatedSumWarning: on a first call, a sum counts what was reduced before.

    Examples:
      >>> import numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("sum", (w * x).sum()))
      >>> float(step(2.0, np.arange(8.0)))
      56.0
    """
    named = batch_argnums is not None
    settings = (
        mesh,
        axis_name,
        slots("batch_argnums", batch_argnums) if named else None,
        slots("donate_argnums", donate_argnums),
        checked(options),
        checked_rule(varying_outputs),
        check_vma,
    )
    if not isinstance(check_vma, bool):
        raise ValueError(f"`check_vma` must be True or False; got {check_vma!r}.")
    if mesh is not None:
        checked_mesh(mesh, axis_name, "data_parallel")
    if step is None:
        return lambda decorated: DataParallel(decorated, *settings)
    if not callable(step) and not isinstance(step, classmethod):
        raise ValueError(f"`data_parallel` expects a function; got {type(step).__name__}.")
    return DataParallel(step, *settings)


@dataclasses.dataclass(eq=False, repr=False)
class DataParallel:
    """A step that runs on every replica; made by `data_parallel`, called like the step.

    Attributes:
      signature: which arguments of a call are the batch.
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
        self._known: dict[Any, Any] = {}
        self._on_ambient: dict[Mesh, DataParallel] = {}
        self._inner = dispatched.InnerDeadlines()

    def __repr__(self) -> str:
        return f"DataParallel({self.signature}, axis_name={self._axis_name!r})"

    @property
    def mesh(self) -> Mesh:
        """The mesh it runs on: without one given, that of `jax.set_mesh` or of all devices."""
        return self._here()._own_mesh

    @property
    def chosen_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that was given, or that of `jax.set_mesh` if it has the axes; None: neither."""
        return ambient_mesh(self._axes) if self._mesh is None else self._mesh

    @functools.cached_property
    def _own_mesh(self) -> Mesh:
        return checked_mesh(self._mesh, self._axis_name, "data_parallel")

    def _here(self) -> DataParallel:
        """This step on the mesh of the caller's `jax.set_mesh`, if that is the one to take."""
        mesh = self.chosen_mesh if self._mesh is None else None
        if not isinstance(mesh, Mesh):  # what is called in a trace is refused for its arguments
            return self
        if mesh not in self._on_ambient:
            self._on_ambient[mesh] = self.on(mesh)
        return self._on_ambient[mesh]

    @functools.cached_property
    def _worlds(self) -> Worlds:
        return worlds_of(self.mesh)

    @functools.cached_property
    def _devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.devices.flat)

    @functools.cached_property
    def _arguments(self) -> Arguments:
        return Arguments(
            self.signature, self.mesh, self._axis_name, self._processes, self.donate_argnums
        )

    @functools.cached_property
    def _processes(self) -> int:
        return equal_shares(self._devices)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """This step as a method: see `bound_step`."""
        instance = owner if isinstance(self._step, classmethod) else instance
        return self if instance is None else bound_step(self, instance, self._bind)

    def _bind(self, instance: Any) -> DataParallel:
        step: Any = self._step
        of = (None, instance) if isinstance(step, classmethod) else (instance,)
        step = step.__get__(*of)
        return self._twin(_step=step, signature=Signature(step, self._batch_argnums))

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The axis, or axes, that a batch is split over."""
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
        """Replicas that share a batch."""
        return math.prod(self.mesh.shape[a] for a in self._axes)

    @boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's result on the whole batch; see `data_parallel`."""
        step = self._here()
        with no_mesh():
            call, checked = step._call(args, kwargs)
            return checked(run(call))

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dispatched.Call, Callable[[Any], Any]]:
        """The call of a program, and what is to be done with its result."""
        self._calls += 1
        name = f"Call {self._calls} of `{getattr(self._step, '__name__', 'step')}`"
        call = self._arguments.ready(args, kwargs)
        (program, claims), checked = self._compiled(call), _unchanged
        if claims.found and claims_are_new(claims, (call.args, call.kwargs)):
            claims = Claims(compares=True)
            program = self._jitted(remember, call, claims)
            checked = checked_claims(claims, self.mesh, self._axes)
        given = program, call.args, self._devices, name, self._options, call.kwargs
        return dispatched.Call(*given, rows=True, inner=self._inner), checked

    def over(self, mesh: AbstractMesh, worlds: Worlds, processes: int) -> DataParallel:
        """This step on devices that are not here: to be traced and lowered, not to be called.

        Args:
          mesh: axes, those of `axis_name` among them.
          worlds: of the reductions inside.
          processes: equal shares of the devices.

        Returns:
          A step of the same function and settings.
        """
        return self._twin(_mesh=mesh, _own_mesh=mesh, _worlds=worlds, _processes=processes)

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
        # What follows from the mesh is found anew, but for what `changed` says of it.
        for cached in ("_own_mesh", "_worlds", "_devices", "_processes", "_arguments"):
            vars(twin).pop(cached, None)
        vars(twin).update(changed, _known={}, _on_ambient={}, _inner=dispatched.InnerDeadlines())
        return twin

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The program for these arguments, traced and not yet lowered.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
          **kwargs: likewise.

        Returns:
          What `jax.jit(...).trace` returns.
        """
        step = self._here()
        with no_mesh():
            call = step._shapes(args, kwargs)
            return step._compiled(call)[0].trace(*call.args, **call.kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, lowered: `.as_text()` shows what is requested.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
          **kwargs: likewise.

        Returns:
          What `jax.jit(...).lower` returns; `.compile().as_text()` shows what was compiled.
        """
        traced = self.trace(*args, **kwargs)
        with no_mesh():
            return traced.lower()

    def trace_recorded(
        self, record: Callable[[CollectivePlan], None], /, *args: Any, **kwargs: Any
    ) -> jax.stages.Traced:
        """Like `trace`, made for the purpose, so that it tells each plan to `record`."""
        step = self._here()
        with no_mesh():
            call = step._shapes(args, kwargs)
            return step._jitted(record, call, Claims()).trace(*call.args, **call.kwargs)

    def _compiled(self, call: Call) -> tuple[Any, Claims]:
        """The jitted program, which its first arguments decide on, and its claims."""
        if call.batch not in self._known:
            claims = Claims()
            self._known[call.batch] = self._jitted(remember, call, claims), claims
        return self._known[call.batch]

    def _jitted(self, record: Callable[[CollectivePlan], None], call: Call, claims: Claims) -> Any:
        """The program, with the compiler options that its plans need with these arguments.

        JAX keeps the trace that finds them, and compiles from it.
        """
        wanted: dict[str, Any] = {}

        def noted(plan: CollectivePlan) -> None:
            wanted.update(plan.compiler_options())
            record(plan)

        program = functools.partial(self._program, noted, call.batch, claims)
        functools.update_wrapper(program, self._step, updated=())
        jitted = functools.partial(jax.jit, program, donate_argnums=self.donate_argnums)
        bare = jitted()
        bare.trace(*call.args, **call.kwargs)
        if not wanted:
            return bare
        here = isinstance(self.mesh, Mesh)
        known = known_options(wanted, self.mesh.devices.flat[0]) if here else wanted
        return jitted(compiler_options=known)

    def _program(
        self,
        record: Callable[[CollectivePlan], None],
        batch: tuple[Slot, ...],
        claims: Claims,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the result of the step on every device of the mesh; this is traced."""
        rows = PartitionSpec(self._axis_name)
        in_specs = (
            *(rows if i in batch else specs_of(arg) for i, arg in enumerate(args)),
            {name: rows if name in batch else specs_of(arg) for name, arg in kwargs.items()},
        )
        scope = Scope(self._worlds, self._options, record, self._inner.ask, self._axes, claims)
        try:
            return stepped(
                self._step,
                self.mesh,
                self._axes,
                scope,
                self._varying_outputs,
                in_specs,
                (*args, kwargs),
                [*map(self.signature.name, range(len(args)))],
                check_vma=self._check_vma,
            )
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(FLAGS)
            raise
        except (TypeError, ValueError) as error:
            if str(Shards) in str(error):  # JAX's, of trees that differ
                error.add_note(_SHARDS_UPDATED)
            raise

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return self._arguments.shapes(self._arguments.asked(args, kwargs))


_SHARDS_UPDATED = """\
`Shards`, as `scatter=True` makes them of gradients, met a whole tree, as an optimizer's state is. \
That of shards has a state of shards: `optimizer = jc.sharded_optimizer(optimizer, "data")`."""


def _unchanged(result: Any) -> Any:
    return result
