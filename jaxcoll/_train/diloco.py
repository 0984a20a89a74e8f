"""DiLoCo: replicas train by themselves, and exchange what they learnt at times."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxcoll._api.collectives import all_reduce
from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run
from jaxcoll._mesh.mesh import axis_names, checked_mesh, no_mesh
from jaxcoll._mesh.replica_rows import ReplicaRows
from jaxcoll._plan.checks import is_integer, is_number, refuse
from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._step.data_parallel import DataParallel, data_parallel
from jaxcoll._train import diloco_state
from jaxcoll._train.diloco_state import DiLoCoState, Schedule, Sum, step_program

_CALLER = "diloco"
_AVERAGE = types.SimpleNamespace(  # takes the mean of the replicas, as `optax.sgd(1.0)`
    init=lambda params: (),
    update=lambda deltas, state, params: (jax.tree.map(jnp.negative, deltas), state),
)


def diloco(
    step: Callable[..., Any],
    *,
    every: int = 30,
    outer: Any = None,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 1.0,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    options: CommunicationOptions | None = None,
) -> DiLoCo:
    """Train every replica by itself, and exchange what each has learnt once in `every` steps.

    Guarantee: n replicas compute what a simulation of them in one process computes, to rounding; a
    local step sends nothing. After `every` steps, with x_i the parameters of replica i and y those
    that all share, the mean of y - x_i is the gradient of which `outer` makes the update of y, and
    each x_i becomes y. It is the algorithm, and not data-parallel training at a lower price: expect
    a higher loss for the same number of steps (docs/diloco.md has numbers).

    Args:
      step: of one device, `(params, opt_state, batch) -> (params, opt_state, metrics)`. It knows
        nothing of other replicas and reduces nothing. Random keys belong in the batch, or all
        replicas draw the same.
      every: steps of a round, in which each parameter travels once.
      outer: an optax transformation, or anything with its `init` and `update`, for the shared
        parameters. None: they become the mean of the replicas', as by `optax.sgd(1.0)`, which has
        no constant to tune and is data-parallel training if `every` is 1. DiLoCo's published
        `optax.sgd(0.7, momentum=0.9, nesterov=True)` moves seven times as far while replicas agree
        on a direction: from scratch, twice as far behind data-parallel training on a small GPT,
        nearer to it on digits. It must be asked for.
      fragments: parts of the parameters, in whole leaves, of nearly equal bytes. Each travels by
        itself, at distances of `every / fragments` steps, and `outer` sees one at a time.
      delay: steps, below `every`, for which a sum is on its way while replicas compute. What comes
        of it is applied then.
      mixing: the weight of the shared parameters where a replica takes them; the rest is its own.
      mesh: devices, each a replica; None: all devices on one axis.
      axis_name: the mesh axis, or all its axes from outer to inner.
      options: as in `all_reduce`, of the sums; `timeout_seconds` bounds each from its beginning.

    Returns:
      A `DiLoCo`: `state = train.init(params, opt_state)`, `state, metrics = train(state,
      batch)`, `params = train.params(state)`. Cost: of each step, nothing; of each round, an
      all-reduce of the parameters. Memory: the shared parameters and the state of `outer` on each
      device beside its own, and with a `delay` the last sums.

    Raises:
      ValueError: an argument is impossible.

    Source: Douillard et al., DiLoCo (arXiv 2311.08105); with fragments, delay and mixing Streaming
    DiLoCo (arXiv 2501.18512), whose alpha is 1 - `mixing`.

    Examples:
      >>> import numpy as np
      >>> def step(w, state, batch):
      ...     return w - 0.25 * (w - batch.mean()), state, w
      >>> train = diloco(step, every=2)
      >>> state = train.init(np.float32(0.0), ())
      >>> for _ in range(2):
      ...     state, before = train(state, np.arange(8, dtype="f"))
      >>> float(train.params(state)), before.tolist()
      (1.53125, [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75])
    """
    if not callable(step) or isinstance(step, DataParallel):
        raise ValueError(
            f"`{_CALLER}` expects a function, the step of one device; got {type(step).__name__}."
        )
    counts = ("every", every, 1), ("fragments", fragments, 1), ("delay", delay, 0)
    for name, value, least in counts:
        if not is_integer(value) or value < least:
            refuse(name, f"an integer of at least {least}", value)
    if delay >= every:
        raise ValueError(
            f"`delay` must be below `every`, so that a fragment arrives before it is sent again; "
            f"got {delay} and {every}."
        )
    if not is_number(mixing) or not 0 < mixing <= 1:
        refuse("mixing", "above 0 and at most 1", mixing)
    outer = _AVERAGE if outer is None else outer
    if not callable(getattr(outer, "init", None)) or not callable(getattr(outer, "update", None)):
        raise ValueError(
            f"`outer` must be None or an optax transformation, something with `init` and `update`; "
            f"got {type(outer).__name__}."
        )
    if mesh is not None:
        checked_mesh(mesh, axis_name, _CALLER)
    schedule = Schedule(int(every), int(fragments), int(delay))
    return DiLoCo(step, schedule, outer, float(mixing), mesh, axis_name, checked(options))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DiLoCo:
    """Replicas that train by themselves; made by `diloco`.

    Attributes:
      step: the program of a local step, of `(state.replicas, batch)`; to be inspected.
      sum: the program of an exchange, of `fragment(state, k)`; a `DataParallel` step.
      schedule: when which fragment is exchanged.
      axis_name: the mesh axis of the replicas, or all axes.
    """

    _one: Callable[..., Any]
    schedule: Schedule
    _outer: Any
    _mixing: float
    _mesh: Mesh | None
    axis_name: str | tuple[str, ...]
    _options: CommunicationOptions

    def on(self, mesh: Mesh) -> DiLoCo:
        """The same training on other devices; the mesh has `axis_name`."""
        return dataclasses.replace(self, _mesh=mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices it trains on; without one given, all at the time of the first use."""
        return checked_mesh(self._mesh, self.axis_name, _CALLER)

    @functools.cached_property
    def _places(self) -> ReplicaRows:
        return ReplicaRows(self.mesh, axis_names(self.axis_name), _CALLER)

    @functools.cached_property
    def step(self) -> Any:
        return step_program(self._one, self._places)

    @functools.cached_property
    def sum(self) -> DataParallel:
        def mean_difference(params: Any, shared: Any, steps: Any) -> Any:
            own = jax.tree.map(lambda x, y: y - x[0], params, shared)
            return all_reduce("mean", own, self.axis_name)

        return data_parallel(
            mean_difference,
            mesh=self.mesh,
            axis_name=self.axis_name,
            batch_argnums=0,
            options=self._options,
        )

    @functools.cached_property
    def _spread(self) -> Any:
        """From a tree that all replicas share to rows of it."""
        n = len(self._places.devices)
        spread = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x[None], (n, *x.shape)))
        return jax.jit(spread, out_shardings=self._places.rows)

    @functools.cached_property
    def _update(self) -> Any:
        """The outer optimizer's step: of shared parameters, its state and the mean difference."""

        def update(shared: Any, state: Any, mean: Any) -> Any:
            updates, state = self._outer.update(mean, state, shared)
            return jax.tree.map(lambda y, u: (y + u).astype(y.dtype), shared, updates), state

        return jax.jit(update, out_shardings=self._places.copies)

    @functools.cached_property
    def _mix(self) -> Any:
        """The parameters that replicas go on with, from their own by rows and the shared ones."""

        def mixed(x: Any, y: Any) -> Any:
            if self._mixing == 1:  # bit by bit, even where `x` is not finite
                return jnp.broadcast_to(y[None], x.shape)
            return ((1 - self._mixing) * x + self._mixing * y[None]).astype(x.dtype)

        return jax.jit(functools.partial(jax.tree.map, mixed), out_shardings=self._places.rows)

    def init(self, params: Any, opt_state: Any) -> DiLoCoState:
        """The state before the first step.

        Args:
          params: the same on every process, which the first sum verifies: arrays of floating-point
            or complex numbers. What must not be averaged belongs to `opt_state`.
          opt_state: any pytree of arrays; every replica begins with a copy and keeps its own.

        Returns:
          A `DiLoCoState`, of which rows are *varying*, and all else *invariant*. Cost: nothing is
          sent.

        Raises:
          ValueError: a leaf is none that can be trained; or there are fewer than `fragments`.
        """
        diloco_state.check_leaves("params", params)
        diloco_state.check_leaves("opt_state", opt_state)
        leaves = jax.tree.leaves(params)
        if len(leaves) < self.schedule.fragments:
            raise ValueError(
                f"`fragments` is {self.schedule.fragments}, and the parameters have "
                f"{len(leaves)} leaves, which are not cut."
            )
        places = self._places
        with no_mesh():
            shared, own = places.place_copies((params, opt_state))
            parts = [diloco_state.part(shared, at) for at in self._fragments(shared)]
            begin = jax.jit(self._outer.init, out_shardings=self._places.copies)
            sums = [diloco_state.arrived(jax.tree.map(jnp.zeros_like, each)) for each in parts]
            return DiLoCoState(
                np.asarray(0),
                self._spread((shared, own)),
                shared,
                tuple(map(begin, parts)),
                tuple(sums if self.schedule.delay else ()),
                np.zeros(len(parts), int),
            )

    def __call__(self, state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        """A local step of every replica, and what is due of exchanges.

        Args:
          state: what `init`, `restart` or the last call returned, or the same read from a file.
          batch: of this process's replicas, or a global array split over all: an equal number of
            rows for each, along the leading dimension of every leaf.

        Returns:
          `(state, metrics)`: metrics as each replica of this process has them, *varying*, with a
          row for each. Nothing is sent to average them.

        Raises:
          ValueError: the state is none of this object's, or has rows for another number of
            replicas; the batch does not divide; or the step does not return what it was given.
          NameError: the step reduces over an axis.
          ReplicaDivergenceError: of a first sum, processes hold different shared parameters.
          PeerLostError: of a sum, as are the errors that `data_parallel` lists.
        """
        diloco_state.check_state(state, len(self._places.devices), self.schedule)
        state, metrics = self.local(state, batch)
        with no_mesh():
            return self._exchanged(state, int(state.steps)), metrics

    def local(self, state: DiLoCoState, batch: Any) -> tuple[DiLoCoState, Any]:
        """A local step of every replica, before anything is exchanged."""
        places = self._places
        diloco_state.check_batch(batch, len(places.devices))
        with no_mesh():
            rows = places.place_rows(state.replicas), places.place_rows(batch)
            call = Call(self.step, rows, places.devices, f"A step of `{_CALLER}`")
            replicas, metrics = run(call)
            steps = np.asarray(int(state.steps) + 1)
            return dataclasses.replace(state, replicas=replicas, steps=steps), metrics

    def params(self, state: DiLoCoState) -> Any:
        """The shared parameters, *invariant*: what to evaluate and to keep.

        They are those after the last exchange: what replicas did since then is not in them.
        """
        return state.shared

    def fragment(self, state: DiLoCoState, k: int) -> tuple[Any, Any, Any]:
        """Return arguments of `sum` for `jc.inspect(train.sum, *train.fragment(state, 0))`.

        Args:
          state: with rows for this object's replicas.
          k: the fragment, from 0.

        Returns:
          Every replica's parameters by rows, the shared ones and the number of steps.
        """
        at = self._fragments(state.shared)[k]
        with no_mesh():
            own = self._places.place_rows(diloco_state.part(state.replicas[0], at))
            shared = self._places.place_copies(diloco_state.part(state.shared, at))
            return self._places.all_rows(own), self._places.all_copies(shared), state.steps

    def restart(self, state: DiLoCoState) -> DiLoCoState:
        """The same training for other replicas: each begins its round at the shared parameters.

        What was on its way is applied. What replicas did since they were last exchanged is lost.
        Replica i takes the optimizer state of row i of `state`, from the first row again where
        these end.

        Args:
          state: with rows for any number of replicas, or of another process.

        Returns:
          A `DiLoCoState` for this object's replicas.
        """
        with no_mesh():
            for k in np.flatnonzero(state.sent):
                state = self.applied(state, int(k), own=False)
            rows = len(jax.tree.leaves(state.replicas)[0])
            taken = np.asarray([i % rows for i in self._places.replicas])
            shared = self._places.place_copies(state.shared)
            kept = jax.tree.map(lambda x: x[taken], state.replicas[1])
            replicas = self._spread(shared), self._places.place_rows(kept)
        return dataclasses.replace(state, shared=shared, replicas=replicas)

    def _exchanged(self, state: DiLoCoState, step: int) -> DiLoCoState:
        """Apply what has arrived, send what is due; without a delay, apply that, too."""
        delay, due = self.schedule.delay, self.schedule.sent(step)
        for k in np.flatnonzero(state.sent):
            # Sent again only if `every` has changed: what is on its way must not be lost then.
            if step >= state.sent[k] + delay or k in due:
                state = self.applied(state, int(k))
        if not due:
            return state
        sums = {k: self._sent(state, k) for k in due}
        state = dataclasses.replace(
            state,
            sums=tuple(sums.get(k, held) for k, held in enumerate(state.sums)),
            sent=np.where(np.isin(np.arange(len(state.sent)), due), step, state.sent),
        )
        for k in () if delay else due:
            state = self.applied(state, k, sums[k])
        return state

    def _sent(self, state: DiLoCoState, k: int) -> Sum:
        wait = self.sum.start(*self.fragment(state, k))
        return Sum(lambda: self._places.place_copies(wait()))

    def applied(
        self, state: DiLoCoState, k: int, found: Sum | None = None, own: bool = True
    ) -> DiLoCoState:
        """The state with the update of fragment k; `own`: replicas take it."""
        at = self._fragments(state.shared)[k]
        mean = (found or state.sums[k]).tree
        arguments = diloco_state.part(state.shared, at), state.outer[k], mean
        shared, outer = self._update(*self._places.place_copies(arguments))
        sent = np.where(np.arange(len(state.sent)) == k, 0, state.sent)
        replicas = state.replicas
        if own:
            params, opt_state = replicas
            mixed = self._mix(diloco_state.part(params, at), shared)
            replicas = diloco_state.joined(params, mixed), opt_state
        return dataclasses.replace(
            state,
            shared=diloco_state.joined(state.shared, shared),
            replicas=replicas,
            outer=(*state.outer[:k], outer, *state.outer[k + 1 :]),
            sent=sent,
        )

    def _fragments(self, shared: Any) -> tuple[tuple[int, ...], ...]:
        sizes = tuple(x.size * x.dtype.itemsize for x in jax.tree.leaves(shared))
        return diloco_state.fragments_of(sizes, self.schedule.fragments)
