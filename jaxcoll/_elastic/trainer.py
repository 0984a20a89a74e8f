"""Training that goes on with those who live when workers die."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxcoll._cluster.coordinator_proxy import give_up_coordinator, when_coordinator_is_lost
from jaxcoll._cluster.initialize import outlives_processes
from jaxcoll._cluster.key_value import LocalKeys
from jaxcoll._compat.coordination import store
from jaxcoll._elastic.arguments import check_numbers, check_step
from jaxcoll._elastic.attempts import MOST_ATTEMPTS, Attempts
from jaxcoll._elastic.checkpoint import Stamp, restore_checkpoint, save_newest, stamp_of_checkpoint
from jaxcoll._elastic.connections import Connections, are_spoiled
from jaxcoll._elastic.generation import (
    CoordinatorLostError,
    Decision,
    RegroupError,
    WorldChange,
    listed,
    rank_of,
)
from jaxcoll._elastic.last_checkpoint import Writers, writers_of, written_by_one
from jaxcoll._elastic.membership import Crew
from jaxcoll._elastic.replicated_state import HeldState
from jaxcoll._elastic.step_call import outcome_of
from jaxcoll._elastic.step_programs import CompiledSteps, mismatch, show
from jaxcoll._errors import DeadlineExceededError, PeerLostError
from jaxcoll._mesh.mesh import line_of
from jaxcoll._step.data_parallel import DataParallel
from jaxcoll._threads import abandon

_LOG = logging.getLogger("jaxcoll")
_JOIN_EVERY = 10  # steps between two looks for workers who want to be taken in
_PATIENCE, _LAST_PATIENCE = 1.0, 30.0  # seconds that another may be about to replace the checkpoint
_runs = itertools.count()


class Elastic:
    """A training loop that goes on with the workers that live.

    Law: every worker holds the whole state after each of the last two steps. When workers die, stop
    or do not finish a step in time, the others agree on the last step that all of them finished,
    build a mesh of their own devices, and go on from there: with bits equal on all of them, which
    is checked, and equal to those of a run that had the smaller world from that step. A mean is
    then one over fewer replicas. A step whose checksum finds a wrong sum is done again, once.

    A worker that was started again, or one that `max_workers` left over, is taken in at the next
    multiple of ten steps, or when another is lost, and is given the state. JAX fixes the number of
    processes when a job starts, so no more than that can work at once.

    Args:
      step: a `jc.data_parallel` step of `(state, batch)` that returns `(state, metrics)`, over one
        axis, and donates nothing.
      state: a pytree of arrays, whole on every worker and the same on all.
      min_workers: fewer than these do not go on: they save the state and raise `PeerLostError`.
      max_workers: more than these wait until they are needed. None: all work.
      timeout_seconds: of one step, its compilation left out. Who did not arrive in it by then is
        left behind. None: no limit; a worker that is stopped then stops all.
      startup_seconds: how long the first meeting, those after a change, and the last checkpoint are
        waited for while all live; it must be longer than a compilation or a checkpoint takes.
      checkpoint: a file. A run begins with what it holds, and the first worker writes it. A newer
        state is never replaced by an older one, and nobody returns before the last one is there: if
        the first worker dies over it or cannot write, the next one does.
      every: steps between two checkpoints. At each, and at the end, all workers compare their
        states bit by bit. Those that differ from most end with `ReplicaDivergenceError`, and all
        do where most do not agree.
      report: called on every worker after each step with the number of finished steps and the
        metrics. A step that had to be done again is reported again.

    Attributes:
      changes: a `WorldChange` for each change of the world, in order.
      finished: steps that are finished.
      workers: process numbers of those who work, in the order of the mesh.

    Raises:
      ValueError: an argument is invalid, the step does not fit, or, with several processes,
        `jax_enable_recoverability` is off, so that JAX would end all when one dies.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> @data_parallel(batch_argnums=1)
      ... def step(w, x):
      ...     loss = lambda w, x: jnp.mean((x - w) ** 2)
      ...     value, gradient = value_and_grad(loss, "data")(w, x)
      ...     return w - 0.25 * gradient, value
      >>> trainer = Elastic(step, np.float32(0.0))
      >>> float(trainer.run(lambda step, rank, world: np.ones(8, np.float32), 3))
      0.875
    """

    def __init__(
        self,
        step: DataParallel,
        state: Any,
        *,
        min_workers: int = 1,
        max_workers: int | None = None,
        timeout_seconds: float | None = 60.0,
        startup_seconds: float = 300.0,
        checkpoint: str | Path | None = None,
        every: int = 100,
        report: Callable[[int, Any], None] | None = None,
    ) -> None:
        check_step(step)
        check_numbers(min_workers, max_workers, timeout_seconds, startup_seconds, every)
        self._step = step
        self._state = HeldState(state)
        self._fewest, self._most = min_workers, max_workers
        self._timeout, self._startup = timeout_seconds, startup_seconds
        self._path = None if checkpoint is None else Path(checkpoint)
        self._every = every
        self._report = report or (lambda step, metrics: None)
        self._term = 0
        self.changes: list[WorldChange] = []
        self.workers: tuple[int, ...] = ()

    @property
    def finished(self) -> int:
        """Steps that are finished."""
        return self._state.finished

    def run(self, batches: Callable[[int, int, int], Any], steps: int) -> Any:
        """Train until `steps` are finished.

        Args:
          batches: called with the step (from 0), this worker's place among the workers, and how
            many there are; returns its rows of the batch: equally many on every worker. After a
            change it is asked again, with another place and number.
          steps: in all, those of the checkpoint included.

        Returns:
          The state, replicated over those who worked to the end; None on a worker that was never
          taken in.

        Raises:
          DeadlineExceededError: a worker did not begin within `startup_seconds`; or a step was late
            20 times in a row though nobody is lost. The state was saved then, if there is a file.
          PeerLostError: too few workers are left, the coordinator died or is stopped, or the others
            left this worker behind. Except by that one the state was saved, if there is a file.
          ReplicaDivergenceError: workers start with different states; or later this worker's
            differs from that of most others, or most do not agree.
          ProgramMismatchError: their states have different structures, or they bring different
            programs to a step. A worker that comes later ends alone for either.
          ValueError: what the step returns is no state like its argument.
          OSError: this worker could not write the last checkpoint.
        """
        if self._path is not None and self._path.exists():
            self._state.reset(*restore_checkpoint(self._path, self._state.latest))
            self._term = stamp_of_checkpoint(self._path).term
        keys = store()
        if keys is not None and not outlives_processes():
            raise ValueError(
                "`Elastic` needs a world that outlives its processes: start it with "
                "`jc.initialize()`, or set `jax.config.update('jax_enable_recoverability', True)` "
                "before `jax.distributed.initialize`."
            )
        crew = Crew(
            keys or LocalKeys(),
            f"jaxcoll/elastic/{next(_runs)}",
            patience=self._timeout or self._startup,
            startup=self._startup,
            most=self._most,
        )
        try:
            crew.meet()
            _exchange_devices()
            patience = self._timeout or self._startup
            with when_coordinator_is_lost(crew.lose_coordinator, patience):
                return _Run(self, crew, batches, steps).run()
        except CoordinatorLostError:
            for thread in crew.threads:
                abandon(thread)
            raise self._without_coordinator() from None
        finally:
            crew.close()

    def _save(self, step: int, patience: float) -> Stamp:
        """Write the state after `step`, unless that of a later one stands there."""
        assert self._path is not None
        if step not in self._state.held:
            raise OSError(f"worker {jax.process_index()} does not hold the state after step {step}")
        stands = save_newest(self._path, self._state.host(step), Stamp(step, self._term), patience)
        if stands.step > step:
            words = "%s holds the state after step %d, and stays: that after step %d is older."
            _LOG.warning(words, self._path, stands.step, step)
        return stands

    def _without_coordinator(self) -> PeerLostError:
        give_up_coordinator()
        saved = "There is no `checkpoint` to save the state to."
        if self._path is not None:
            # Others that are not cut off may have gone on. What they saved is newer and stays.
            try:
                step = self._save(self.finished, _LAST_PATIENCE).step
                saved = f"The state after step {step} is saved in {self._path}."
            except OSError as error:
                saved = f"The state after step {self.finished} could not be saved: {error}."
        return PeerLostError(
            "The coordinator died, is stopped, or is cut off from this worker: nothing can be "
            f"agreed upon any more. {saved} Start the job again, unless others go on.",
            ranks=(),
        )


class _Run:
    """One call of `Elastic.run`."""

    def __init__(self, trainer: Elastic, crew: Crew, batches: Any, steps: int) -> None:
        self._trainer, self._crew = trainer, crew
        self._batches, self._steps = batches, steps
        self._state = trainer._state
        self._compiled: CompiledSteps | None = None
        self._attempts = Attempts()
        self._began = 0.0
        self._changes: list[tuple[float, WorldChange]] = []
        self._connections: Connections | None = None
        self._writers = Writers((), 0)

    def run(self) -> Any:
        self._crew.anew = are_spoiled()
        entered = self._crew.enter(self._state.finished, self._trainer._term)
        if entered is None:
            return None
        decision, self._began = entered, time.monotonic()
        try:
            while not (decision.ended and self._state.finished >= self._steps):
                try:
                    self._train(decision, self._settle(decision))
                    self._end(decision)
                    self._leave_connections(broken=False)
                    break
                except BaseException as error:
                    self._leave_connections(broken=True)
                    if not isinstance(error, RegroupError):
                        raise
                    self._began = time.monotonic()
                    decision = self._crew.decide(self._state.finished, self._state.held)
                    self._attempts.count(decision)
        finally:
            self._date_changes()
        return self._state.latest

    def _leave_connections(self, *, broken: bool) -> None:
        if self._connections is not None:
            self._connections.end(broken=broken)
        self._connections = None

    def _end(self, decision: Decision) -> None:
        """Nobody leaves before all agree upon the state and, with a file, one has written it."""
        assert self._compiled is not None
        self._compiled.end(self._steps)
        self._state.compare(decision, self._crew)
        writer, failure = self._written(self._state.finished)
        if writer or not self._writers.names:
            self._crew.finish()
        if failure:
            raise failure

    def _written(self, step: int) -> tuple[str, OSError | None]:
        write = functools.partial(self._trainer._save, step, _LAST_PATIENCE)
        return written_by_one(self._crew, self._writers, write)

    def _date_changes(self) -> None:
        for began, change in self._changes:
            seconds = time.monotonic() - began
            self._trainer.changes.append(dataclasses.replace(change, seconds=seconds))
        self._changes.clear()

    def _settle(self, decision: Decision) -> CompiledSteps:
        """Take the place, the mesh and the state that were decided."""
        mine = self._compiled.lines if self._compiled else ()
        if decision.ends_for_its_program(self._crew.name):
            raise mismatch(decision, self._crew, mine)
        show(decision, self._crew, mine)
        lost = tuple(map(rank_of, decision.lost))
        if self._crew.name in decision.members:
            self._trainer._term = decision.term
        few = len(decision.members) < self._trainer._fewest and decision.step < self._steps
        few = few and not decision.ended
        if few or self._crew.name in decision.members:
            every = self._trainer._every if self._trainer._path else 0
            self._writers = writers_of(self._crew, decision, every)
        if few:
            self._give_up(
                decision,
                PeerLostError(
                    f"{len(decision.members)} workers are left ({listed(decision.ranks)}), and "
                    f"`min_workers` is {self._trainer._fewest}: {decision.why}.",
                    ranks=lost,
                ),
            )
        if self._crew.name not in decision.members:
            went_on = (
                "have finished. There is nothing left to do."
                if decision.ended
                else f"went on from step {decision.step} as workers {listed(decision.ranks)}, "
                f"because {decision.why}. It must not go on by itself; start it again."
            )
            raise PeerLostError(
                f"Worker {rank_of(self._crew.name)} was left behind by the others, who {went_on}",
                ranks=(rank_of(self._crew.name),),
            )
        if self._attempts.are_over:
            self._give_up(decision, self._attempts.error or _always_late(decision))
        joined = tuple(map(rank_of, decision.joined))
        self._trainer.workers = decision.ranks
        if decision.number:
            _LOG.warning(
                "After step %d: %s. Lost: %s; joined: %s; workers %s go on.",
                *(decision.step, decision.why, listed(lost), listed(joined)),
                listed(decision.ranks),
            )
            change = WorldChange(decision.step, decision.ranks, lost, joined, decision.why, 0.0)
            self._changes.append((self._began, change))
        self._connections = Connections(self._crew, decision)
        self._connections.begin()
        mesh = line_of(self._connections.of(decision.ranks), str(self._trainer._step.axis_name))
        self._compiled = CompiledSteps(self._trainer._step, mesh, self._crew)
        self._state.settle(decision, self._crew, mesh, self._together)
        self._connections.forget_others()
        return self._compiled

    def _give_up(self, decision: Decision, error: Exception) -> NoReturn:
        """Save what all have, and end."""
        writer, failure = self._written(decision.step)
        if writer:
            saved = f"The state after step {decision.step} is saved in {self._trainer._path}."
            error.args = (f"{error} {saved}",)
        elif failure:
            error.args = (f"{error} The state could not be saved: {failure}.",)
        raise error

    def _train(self, decision: Decision, compiled: CompiledSteps) -> None:
        place_here = decision.members.index(self._crew.name)
        for step in range(decision.step, self._steps):
            self._crew.check()
            if step % _JOIN_EVERY == 0 and step > decision.step and self._crew.joins_at(step):
                raise RegroupError
            batch = self._batches(step, place_here, len(decision.members))
            call = compiled.prepared(step, self._state, batch)
            self._crew.check()
            state, metrics = self._together(call, self._trainer._timeout, f"step {step}")
            self._state.keep(step + 1, state)
            if self._connections is not None:
                self._connections.settle()
            self._date_changes()
            self._report_and_save(step + 1, metrics, decision)

    def _together(self, call: Callable[[], Any], seconds: float | None, what: str) -> Any:
        try:
            return outcome_of(call, self._crew, seconds, what)
        except (RuntimeError, ValueError) as error:  # what JAX raises for a broken connection
            reason = str(error).splitlines()[0][:200]
            name = rank_of(self._crew.name)
            if not self._crew.ask(f"{what} failed on worker {name}: {reason}"):
                # If nobody turns out to be lost, and it fails again, it is no fault of the others.
                self._attempts.fail(error)
            raise RegroupError from error

    def _report_and_save(self, finished: int, metrics: Any, decision: Decision) -> None:
        trainer = self._trainer
        trainer._report(finished, metrics)
        last = finished == self._steps
        if last or not self._writers.are_due(finished):
            return
        self._state.compare(decision, self._crew)
        if self._crew.name != self._writers.names[0]:
            return
        try:
            trainer._save(finished, _PATIENCE)
        except OSError as error:
            _LOG.warning("%s %s", error, " ".join(getattr(error, "__notes__", ())))


def _exchange_devices() -> None:
    """Have JAX tell all processes of all devices, which it does when they are first asked for."""
    try:
        jax.devices()
    except RuntimeError as error:
        if isinstance(error.__context__, DeadlineExceededError | PeerLostError):
            raise error.__context__ from None
        raise


def _always_late(decision: Decision) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"Workers {listed(decision.ranks)} began the step after step {decision.step} "
        f"{MOST_ATTEMPTS} times in a row and never finished it, though all live and connect to "
        f"each other. The last time, {decision.why}. A larger `timeout_seconds` waits longer.",
        ranks=(),
    )
