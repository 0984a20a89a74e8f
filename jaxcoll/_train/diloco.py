"""DiLoCo: replicas train by themselves, and exchange what they learnt once in a round of steps."""

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

from jaxcoll._api.collectives import all_reduce
from jaxcoll._mesh.mesh import axis_names, checked_mesh, no_mesh
from jaxcoll._mesh.replica_rows import ReplicaRows
from jaxcoll._plan.checks import kind_of, positive, refuse
from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._plan.packs.leaves import flattened, is_array
from jaxcoll._step.data_parallel import DataParallel, data_parallel


def diloco(
    step: Callable[..., Any],
    every: int = 30,
    *,
    outer: Any = None,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    options: CommunicationOptions | None = None,
) -> DiLoCo:
    """Train every replica by itself, and exchange what each has learnt once in `every` steps.

    Guarantee: n replicas compute what a simulation of them in one process computes, to rounding; a
    local step sends nothing. After `every` steps, with x_i the parameters of replica i and y those
    that all share, the mean of y - x_i is the gradient of which `outer` makes the update of y, and
    each x_i becomes y. After as many steps the loss is higher than data-parallel training's.

    Args:
      step: of one device, `(params, opt_state, batch) -> (params, opt_state, metrics)`. It knows
        nothing of other replicas and reduces nothing. Random keys belong in the batch, or all
        replicas draw the same.
      every: steps of a round, at whose end all parameters travel.
      outer: an optax transformation for the shared parameters. None: they become the mean of the
        replicas', as by `optax.sgd(1.0)`. DiLoCo's published choice, `optax.sgd(0.7, momentum=0.9,
        nesterov=True)`, moves seven times as far while replicas agree.
      mesh: devices, each a replica; None: all devices on one axis.
      axis_name: the mesh axis, or all its axes from outer to inner.
      options: as in `all_reduce`, of the exchange; `timeout_seconds` bounds it.

    Returns:
      A `DiLoCo`: `state = train.init(params, opt_state)`; `state, metrics = train(state, batch)`;
      `state.shared` are the parameters. Cost: their all-reduce in each round, and memory for them
      and for the state of `outer` on each device, beside its own.

    Raises:
      ValueError: an argument is impossible.

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
        checked_mesh(mesh, axis_name, "diloco")
    every = positive("diloco", "every", every)
    return DiLoCo(step, every, outer, mesh, axis_name, checked(options))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiLoCoState:
    """The state of `DiLoCo` in one process: a pytree that `jc.save_checkpoint` takes.

    Attributes:
      steps: that are finished; in host memory.
      replicas: `(params, opt_state)`, with a row for each replica of this process, *varying*.
      shared: the parameters after the last exchange, *invariant*: what to evaluate and to keep.
      outer: the outer optimizer's state, *invariant*.
    """

    steps: Any
    replicas: tuple[Any, Any]
    shared: Any
    outer: Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DiLoCo:
    """Replicas that train by themselves; made by `diloco`.

    Attributes:
      step: the program of a local step, of `(state.replicas, batch)`.
      sum: that of an exchange, of `arguments(state)`; a `DataParallel` step.
    """

    _one: Callable[..., Any]
    every: int
    _outer: Any
    _mesh: Mesh | None
    axis_name: str | tuple[str, ...]
    _options: CommunicationOptions

    def on(self, mesh: Mesh) -> DiLoCo:
        """The same training on other devices; the mesh has `axis_name`."""
        return dataclasses.replace(self, _mesh=mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices it trains on; without one given, all at the time of the first use."""
        return checked_mesh(self._mesh, self.axis_name, "diloco")

    @functools.cached_property
    def _places(self) -> ReplicaRows:
        return ReplicaRows(self.mesh, axis_names(self.axis_name))

    @functools.cached_property
    def step(self) -> Any:
        mesh, rows = self._places.mesh, self._places.rows.spec
        step = functools.partial(_step_of_row, self._one)
        # Without types: a gradient in here is this replica's own.
        mapped = jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        return jax.jit(functools.update_wrapper(mapped, self._one, updated=()))

    @functools.cached_property
    def sum(self) -> DataParallel:
        def mean_difference(params: Any, shared: Any, steps: Any) -> Any:
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
            updates, state = self._outer.update(mean, state, shared)
            return jax.tree.map(lambda y, u: (y + u).astype(y.dtype), shared, updates), state

        return jax.jit(update, out_shardings=self._places.copies)

    @functools.cached_property
    def _spread(self) -> Any:
        n = len(self._places.devices)
        spread = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (n, *x.shape)))
        return jax.jit(spread, out_shardings=self._places.rows)

    def init(self, params: Any, opt_state: Any) -> DiLoCoState:
        """The state before the first step.

        Args:
          params: the same on every process, which the first exchange verifies: arrays of
            floating-point or complex numbers. What must not be averaged belongs to `opt_state`.
          opt_state: any pytree of arrays; every replica begins with a copy and keeps its own.

        Raises:
          ValueError: a leaf is none that can be trained.
        """
        for name, leaf in _named(params, opt_state):
            if not is_array(leaf):
                raise ValueError(f"`diloco`: {name} is no array of numbers; got {kind_of(leaf)}.")
            dtype = jnp.result_type(leaf)
            if name.startswith("params") and not jnp.issubdtype(dtype, jnp.inexact):
                raise ValueError(
                    f"`diloco`: {name} is of {dtype}, whose mean has another type. Counters and "
                    "the like belong to `opt_state`, which each replica keeps for itself."
                )
        with no_mesh():
            shared, own = self._places.place_copies((params, opt_state))
            begin = (lambda _: ()) if self._outer is None else self._outer.init
            outer = jax.jit(begin, out_shardings=self._places.copies)(shared)
            return DiLoCoState(np.asarray(0), self._spread((shared, own)), shared, outer)

    def __call__(self, state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        """A local step of every replica, and the exchange if it ends a round.

        Args:
          state: what `init`, `restart` or the last call returned, or the same read from a file.
          batch: of this process's replicas, or a global array split over all: equally many rows
            for each, along the leading dimension of every leaf.

        Returns:
          The state, and the metrics of each replica of this process, by rows, *varying*.

        Raises:
          ValueError: the state has rows for another number of replicas, the batch does not divide,
            or the step does not return what it was given.
          NameError: the step reduces over an axis.
          ReplicaDivergenceError: of a first exchange, processes hold different shared parameters.
          PeerLostError: of an exchange, as are the errors that `data_parallel` lists.
        """
        check_state(state, len(self._places.devices))
        state, metrics = self.local(state, batch)
        if state.steps % self.every == 0:
            state = self.applied(state, self.sum(*self.arguments(state)))
        return state, metrics

    def local(self, state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        """A local step of every replica, before anything is exchanged."""
        here = len(self._places.devices)
        for path, x in flattened(batch)[0]:
            if not np.ndim(x) or np.shape(x)[0] % here:
                raise ValueError(
                    f"`diloco`: batch{path} has the shape {np.shape(x)}, and its rows are to be "
                    f"shared by {here} replicas of this process, equally."
                )
        with no_mesh():
            replicas, metrics = self.step(*map(self._places.place_rows, (state.replicas, batch)))
        steps = np.asarray(int(state.steps) + 1)
        return dataclasses.replace(state, replicas=replicas, steps=steps), metrics

    def arguments(self, state: DiLoCoState) -> tuple[Any, Any, Any]:
        """Return arguments of `sum`, as for `jc.inspect(train.sum, *train.arguments(state))`."""
        at = self._places
        with no_mesh():
            own, shared = at.place_rows(state.replicas[0]), (state.shared, state.steps)
            return at.all_rows(own), *at.all_copies(at.place_copies(shared))

    def applied(self, state: DiLoCoState, mean: Any) -> DiLoCoState:
        """The state after an exchange, from what `sum` returned."""
        with no_mesh():
            held = state.shared, state.outer, mean
            shared, outer = self._update(*self._places.place_copies(held))
            replicas = self._spread(shared), state.replicas[1]
        return dataclasses.replace(state, replicas=replicas, shared=shared, outer=outer)

    def restart(self, state: DiLoCoState) -> DiLoCoState:
        """The same training for other replicas, which go on from the shared parameters.

        Replica i takes the optimizer state of row i of `state`, which may be another process's;
        from the first row again where these end.
        """
        taken = np.asarray(self._places.replicas) % len(jax.tree.leaves(state.replicas)[0])
        with no_mesh():
            shared = self._places.place_copies(state.shared)
            kept = jax.tree.map(lambda x: x[taken], state.replicas[1])
            replicas = self._spread(shared), self._places.place_rows(kept)
        return dataclasses.replace(state, replicas=replicas, shared=shared)


def check_state(state: Any, here: int) -> None:
    """Refuse a state that does not fit the replicas that are here."""
    if not isinstance(state, DiLoCoState):
        raise ValueError(f"`diloco` expects the state that `init` returned; got {kind_of(state)}.")
    if isinstance(state.steps, Tracer):
        raise ValueError("`diloco` cannot be traced: for `jc.inspect` it has a `step` and a `sum`.")
    if rows := {len(x) for x in jax.tree.leaves(state.replicas)} - {here}:
        raise ValueError(
            f"`diloco`: the state has rows for {max(rows)} replicas, and this process has {here}. "
            "`restart(state)` makes one for these."
        )


def _named(params: Any, opt_state: Any) -> list[tuple[str, Any]]:
    """Leaves of both, each with its name in messages."""
    trees = ("params", params), ("opt_state", opt_state)
    return [(name + path, leaf) for name, tree in trees for path, leaf in flattened(tree)[0]]


def _step_of_row(step: Callable[..., Any], replica: tuple[Any, Any], batch: Any) -> Any:
    """A step on the one row that a device has of its replica, and its rows of the batch."""
    given = jax.tree.map(lambda x: x[0], replica)
    try:
        result = step(*given, batch)
    except NameError as error:
        error.add_note("`diloco`: a step is that of one device and reduces nothing, along no axis.")
        raise
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple) else kind_of(result)
        raise ValueError(f"`diloco`: a step returns (params, opt_state, metrics); got {got}.")
    *kept, metrics = jax.tree.map(jnp.asarray, result)
    was, became = ({f"{k} {x.dtype}{list(x.shape)}" for k, x in _named(*t)} for t in (given, kept))
    if was != became:
        first, now = (min(found, default="nothing") for found in (was - became, became - was))
        raise ValueError(f"`diloco`: a step returns the types it was given; {first} became {now}.")
    return jax.tree.map(lambda x: x[None], (tuple(kept), metrics))
