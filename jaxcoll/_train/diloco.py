"""DiLoCo: replicas train independently and exchange parameters once in a round of steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxcoll._collectives.all_reduce import all_reduce
from jaxcoll._gradients.batch import Call, check_shares
from jaxcoll._plan.checks import describe_type, positive, refuse
from jaxcoll._plan.options import CommunicationOptions, check_options
from jaxcoll._plan.packs.leaves import flatten_with_paths, is_array, refuse_tied
from jaxcoll._step.data_parallel import data_parallel
from jaxcoll._step.mesh.mesh import axis_names, check_mesh, no_mesh
from jaxcoll._step.mesh.replica_rows import ReplicaRows
from jaxcoll._step.step import DataParallel


def diloco(
    step: Callable[..., Any],
    every: int = 30,
    *,
    outer: Any = None,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    options: CommunicationOptions | None = None,
) -> DiLoCo:
    """Train each replica independently, and exchange parameters every `every` steps.

    Guarantee: n replicas compute what a simulation of them in one process computes, to rounding; a
    local step sends nothing. Let x_i be the parameters of replica i, and y the shared parameters.
    After `every` steps the mean of y - x_i is the gradient with which `outer` updates y, and each
    x_i becomes y. The loss is higher than after as many steps of data-parallel training.

    Args:
      step: the step of one device, `(params, opt_state, batch) -> (params, opt_state, metrics)`. It
        makes no reductions. Pass random keys in the batch, or all replicas draw the same numbers.
      every: number of steps in a round. All parameters travel at its end.
      outer: an optax transformation for the shared parameters. None: they become the mean of the
        replicas' parameters, as with `optax.sgd(1.0)`. DiLoCo's published choice, `optax.sgd(0.7,
        momentum=0.9, nesterov=True)`, moves seven times as far while replicas agree.
      mesh: the devices, one replica on each; None: all devices on one axis.
      axis_name: the mesh axis, or all its axes from outer to inner.
      options: as in `all_reduce`, for the exchange; `timeout_seconds` bounds it.

    Returns:
      A `DiLoCo`: `state = train.init(params, opt_state)`; `state, metrics = train(state, batch)`;
      `state.shared` has the parameters. Cost: one all-reduce of the parameters per round, and on
      each device, memory for the shared parameters and the state of `outer`.

    Raises:
      ValueError: an argument is invalid.

    Source: Douillard et al., DiLoCo (arXiv 2311.08105).

    Examples:
      >>> import numpy as np
      >>> train = diloco(lambda w, s, x: (w - 0.25 * (w - x.mean()), s, w), every=2)
      >>> state = train.init(np.float32(0.0), ())
      >>> for _ in range(2):
      ...     state, before = train(state, np.arange(8, dtype="f"))
      >>> float(state.shared), before.tolist()
      (1.53125, [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75])
    """
    if not callable(step) or isinstance(step, DataParallel):
        refuse("step", "a function, the step of one device", step)
    has = (callable(getattr(outer, name, None)) for name in ("init", "update"))
    if outer is not None and not all(has):
        refuse("outer", "None or an optax transformation, with its `init` and `update`", outer)
    if mesh is not None:
        check_mesh(mesh, axis_name, "diloco")
    every = positive("diloco", "every", every)
    return DiLoCo(step, every, outer, mesh, axis_name, check_options(options))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiLoCoState:
    """The state of `DiLoCo` in one process: a pytree that `jc.save_checkpoint` accepts.

    Attributes:
      steps: number of finished steps; in host memory.
      replicas: `(params, opt_state)`, with a row for each replica of this process, *varying*.
      shared: the parameters after the last exchange, *invariant*; evaluate and keep these.
      outer: the outer optimizer's state, *invariant*.
    """

    steps: Any
    replicas: tuple[Any, Any]
    shared: Any
    outer: Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DiLoCo:
    """A train step of independent replicas; made by `diloco`.

    Attributes:
      step: the program of a local step; its arguments are `state.replicas` and `batch`.
      sum: the program of an exchange, a `DataParallel` step; its arguments are `arguments(state)`.
    """

    _device_step: Callable[..., Any]
    every: int
    _outer: Any
    _mesh: Mesh | None
    axis_name: str | tuple[str, ...]
    _options: CommunicationOptions

    def on(self, mesh: Mesh) -> DiLoCo:
        """Move the training to other devices; the mesh must have `axis_name`."""
        return dataclasses.replace(self, _mesh=mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh it trains on. By default it has all devices at the time of the first use."""
        return check_mesh(self._mesh, self.axis_name, "diloco")

    @functools.cached_property
    def _places(self) -> ReplicaRows:
        return ReplicaRows(self.mesh, axis_names(self.axis_name))

    @functools.cached_property
    def step(self) -> Any:
        mesh, rows = self._places.mesh, self._places.rows.spec
        step = functools.partial(_step_of_row, self._device_step, self.mesh.size)
        # Without types, so that a gradient is that of this replica's loss
        mapped = jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        return jax.jit(functools.update_wrapper(mapped, self._device_step, updated=()))

    @functools.cached_property
    def sum(self) -> DataParallel:
        def mean_difference(params: Any, shared: Any, steps: Any) -> Any:
            # Differences, not parameters: where these travel in few bits, rounding is relative to
            # them.
            return all_reduce("mean", jax.tree.map(lambda x, y: y - x[0], params, shared))

        return data_parallel(
            mean_difference, mesh=self.mesh, axis_name=self.axis_name, batch_argnums=0,
            options=self._options,
        )  # fmt: skip

    @functools.cached_property
    def _update(self) -> Any:
        def update(shared: Any, state: Any, mean: Any) -> Any:
            if self._outer is None:
                return jax.tree.map(jnp.subtract, shared, mean), state
            # The mean of y - x_i points uphill, like a gradient.
            updates, state = self._outer.update(mean, state, shared)
            return jax.tree.map(lambda y, u: (y + u).astype(y.dtype), shared, updates), state

        return jax.jit(update, out_shardings=self._places.copies)

    @functools.cached_property
    def _spread(self) -> Any:
        n = len(self._places.devices)
        spread = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (n, *x.shape)))
        return jax.jit(spread, out_shardings=self._places.rows)

    def init(self, params: Any, opt_state: Any) -> DiLoCoState:
        """Make the state before the first step.

        Args:
          params: a pytree of floating-point or complex arrays, the same on every process; the first
            exchange verifies this. Values that must not be averaged belong in `opt_state`.
          opt_state: any pytree of arrays. Every replica starts with a copy and keeps its own.

        Raises:
          ValueError: a leaf is not an array, or one of `params` has another dtype.
        """
        for name, leaf in _name_leaves(params, opt_state):
            if not is_array(leaf):
                got = describe_type(leaf)
                raise ValueError(f"`diloco`: {name} is not an array of numbers; got {got}.")
            dtype = jnp.result_type(leaf)
            if name.startswith("params") and not jnp.issubdtype(dtype, jnp.inexact):
                advice = "Put counters into `opt_state`, of which each replica has its own"
                raise ValueError(
                    f"`diloco`: {name} has dtype {dtype}, and its mean another one. {advice}."
                )
        with no_mesh():
            shared, opt_state = self._places.place_copies((params, opt_state))
            begin = (lambda _: ()) if self._outer is None else self._outer.init
            outer = jax.jit(begin, out_shardings=self._places.copies)(shared)
            return DiLoCoState(np.asarray(0), self._spread((shared, opt_state)), shared, outer)

    def __call__(self, state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        """Run a local step of every replica, and the exchange if the step ends a round.

        Args:
          state: the result of `init`, `restart`, the last call or `jc.restore_checkpoint`.
          batch: a pytree of arrays: rows for this process's replicas, or global arrays split over
            all. Every replica gets equally many rows along the leading dimension of each leaf.

        Returns:
          The state, and the metrics with a row for each replica of this process, *varying*.

        Raises:
          ValueError: the state has rows for another number of replicas, the batch does not divide
            or has unequal numbers of rows that broadcast only within a replica, or the step returns
            values of other types than it got.
          NameError: the step reduces over an axis.
          ReplicaDivergenceError: in a first exchange, processes hold different shared parameters.
          PeerLostError: in an exchange; the errors that `data_parallel` lists are possible too.
        """
        check_state(state, len(self._places.devices))
        state, metrics = self.local(state, batch)
        if state.steps % self.every == 0:
            state = self.apply_mean(state, self.sum(*self.arguments(state)))
        return state, metrics

    def local(self, state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        """Run a local step of every replica, without an exchange."""
        here = len(self._places.devices)
        for path, x in flatten_with_paths(batch)[0]:
            if not np.ndim(x) or np.shape(x)[0] % here:
                rows = f"whose rows do not divide over {here} replicas of this process"
                raise ValueError(f"`diloco`: batch{path} has shape {np.shape(x)}, {rows}.")
        with no_mesh():
            replicas, metrics = self.step(*map(self._places.place_rows, (state.replicas, batch)))
        steps = np.asarray(int(state.steps) + 1)
        return dataclasses.replace(state, replicas=replicas, steps=steps), metrics

    def arguments(self, state: DiLoCoState) -> tuple[Any, Any, Any]:
        """Make the arguments of `sum`, as in `jc.inspect(train.sum, *train.arguments(state))`."""
        at = self._places
        with no_mesh():
            params, shared = at.place_rows(state.replicas[0]), (state.shared, state.steps)
            return at.all_rows(params), *at.all_copies(at.place_copies(shared))

    def apply_mean(self, state: DiLoCoState, mean: Any) -> DiLoCoState:
        """Make the state after an exchange, given the result of `sum`."""
        with no_mesh():
            copies = self._places.place_copies((state.shared, state.outer, mean))
            shared, outer = self._update(*copies)
            replicas = self._spread(shared), state.replicas[1]
        return dataclasses.replace(state, replicas=replicas, shared=shared, outer=outer)

    def restart(self, state: DiLoCoState) -> DiLoCoState:
        """Make the state for other replicas, which continue from the shared parameters.

        Replica i gets the optimizer state of row i of `state`, which may come from another process.
        If there are more replicas than rows, rows are used again from the first on.
        """
        taken = np.asarray(self._places.replicas) % len(jax.tree.leaves(state.replicas)[0])
        with no_mesh():
            shared = self._places.place_copies(state.shared)
            # With more replicas than rows, some begin with equal states.
            kept = jax.tree.map(lambda x: x[taken], state.replicas[1])
            replicas = self._spread(shared), self._places.place_rows(kept)
        return dataclasses.replace(state, replicas=replicas, shared=shared)


def check_state(state: Any, here: int) -> None:
    if not isinstance(state, DiLoCoState):
        got = describe_type(state)
        raise ValueError(f"`diloco` expects the state that `init` returned; got {got}.")
    if isinstance(state.steps, Tracer):
        raise ValueError("`diloco` cannot be traced: pass its `step` or its `sum` to `jc.inspect`.")
    if rows := {len(x) for x in jax.tree.leaves(state.replicas)} - {here}:
        has = f"the state has rows for {max(rows)} replicas, and this process has {here}"
        raise ValueError(f"`diloco`: {has}. `restart(state)` makes a state for these.")


def _name_leaves(params: Any, opt_state: Any) -> list[tuple[str, Any]]:
    trees = {"params": params, "opt_state": opt_state}
    refuse_tied(trees, "diloco")
    return [(name + p, x) for name, tree in trees.items() for p, x in flatten_with_paths(tree)[0]]


def _step_of_row(
    step: Callable[..., Any], replicas: int, replica: tuple[Any, Any], batch: Any
) -> Any:
    """Run the step on this device's replica, which has one row, and its rows of the batch."""
    arguments = jax.tree.map(lambda x: x[0], replica)
    try:
        result = step(*arguments, batch)
    except NameError as error:
        error.add_note("`diloco` expects a step of one device, without reductions over any axis.")
        raise
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple) else describe_type(result)
        raise ValueError(f"`diloco`: a step returns (params, opt_state, metrics); got {got}.")
    *state, metrics = jax.tree.map(jnp.asarray, result)
    trees = arguments, state
    # A state of other types would be traced anew in the next step, and would not fit the sum.
    before, after = ({f"{k} {x.dtype}{list(x.shape)}" for k, x in _name_leaves(*t)} for t in trees)
    if before != after:
        old, new = (min(types, default="nothing") for types in (before - after, after - before))
        raise ValueError(f"`diloco`: a step must return the types that it got; {old} became {new}.")
    call = Call((*arguments, batch), {}, (2,))
    check_shares(lambda args, _: step(*args), call, replicas, lambda _: "batch", "diloco")
    return jax.tree.map(lambda x: x[None], (tuple(state), metrics))
