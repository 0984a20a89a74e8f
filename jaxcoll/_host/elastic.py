"""Training that goes on with those who live when workers die."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcoll._compat_coordination import store
from jaxcoll._host import gloo
from jaxcoll._host.checkpoint import restore_checkpoint, save_checkpoint, step_of_checkpoint
from jaxcoll._host.compiled_steps import CompiledSteps, mismatch
from jaxcoll._host.crew import Crew
from jaxcoll._host.data_parallel import DataParallel
from jaxcoll._host.decision import CoordinatorLostError, Decision, RegroupError, rank_of
from jaxcoll._host.given_up import are_left, leave_behind, outcome_of
from jaxcoll._host.held_state import HeldState
from jaxcoll._host.initialize import outlives_processes
from jaxcoll._host.local_keys import LocalKeys
from jaxcoll._host.mesh import line_of
from jaxcoll._host.relay import give_up_coordinator, when_coordinator_is_lost
from jaxcoll._plan.errors import DeadlineExceededError, PeerLostError

_LOG = logging.getLogger("jaxcoll")
_JOIN_EVERY = 10  # steps between two looks for workers who want to be taken in
_runs = itertools.count()


@dataclasses.dataclass(frozen=True)
class WorldChange:
    """One change of who works in an `Elastic` run.

    Attributes:
      step: finished steps from which it went on.
      workers: process numbers of those who went on, in the order of the mesh.
      lost: process numbers of those who did not.
      joined: process numbers of those who were taken in.
      why: what was noticed first.
      seconds: from then until a step was finished again, compilation included.
    """

    step: int
    workers: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: str
    seconds: float


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
      startup_seconds: how long the first meeting, and those after a change, wait for a worker that
        lives; it must be longer than a compilation takes.
      checkpoint: a file. A run begins with what it holds, and the first worker writes it.
      every: steps between two checkpoints.
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
        _check_step(step)
        _check_numbers(min_workers, max_workers, timeout_seconds, startup_seconds, every)
        self._step = step
        self._state = HeldState(state)
        self._fewest, self._most = min_workers, max_workers
        self._timeout, self._startup = timeout_seconds, startup_seconds
        self._path = None if checkpoint is None else Path(checkpoint)
        self._every = every
        self._report = report or (lambda step, metrics: None)
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
          DeadlineExceededError: a worker did not begin within `startup_seconds`.
          PeerLostError: too few workers are left, the coordinator died or is stopped, or the others
            left this worker behind. Except by that one the state was saved, if there is a file.
          ReplicaDivergenceError: workers hold different states.
          ProgramMismatchError: their states have different structures, or they bring different
            programs to a step.
          ValueError: what the step returns is no state like its argument.
          OSError: the last checkpoint could not be written.
        """
        if self._path is not None and self._path.exists():
            self._state.reset(*restore_checkpoint(self._path, self._state.latest))
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
                leave_behind(thread)
            raise self._without_coordinator() from None
        finally:
            crew.close()

    def _save(self, step: int) -> None:
        if self._path is not None:
            save_checkpoint(self._path, self._state.host(step), step=step)

    def _without_coordinator(self) -> PeerLostError:
        give_up_coordinator()
        saved = "There is no `checkpoint` to save the state to."
        if self._path is not None:
            # Others that are not cut off may have gone on. Of those that are, whoever comes last is
            # at most one step ahead or behind.
            held = step_of_checkpoint(self._path)
            if held < self.finished:
                self._save(self.finished)
            step = max(held, self.finished)
            saved = f"The state after step {step} is saved in {self._path}."
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
        self._failed: Any = None
        self._began = 0.0
        self._change: WorldChange | None = None
        self._gloo = gloo.Made(())

    def run(self) -> Any:
        self._crew.publish("gloo", json.dumps(gloo.listening()))
        entered = self._crew.enter(self._state.finished)
        if entered is None:
            return None
        decision, self._began = entered, time.monotonic()
        while True:
            try:
                self._train(decision, self._settle(decision))
                self._crew.finish()
                break
            except BaseException as error:
                if are_left():
                    self._gloo.cut()
                if not isinstance(error, RegroupError):
                    raise
                self._began = time.monotonic()
                self._change = None
                decision = self._crew.decide(self._state.finished, self._state.held)
                if not decision.lost and not decision.joined:  # the step failed, here or elsewhere
                    self._failed = (decision.step, frozenset(decision.members))
        if self._trainer._path is not None and self._crew.name == decision.members[0]:
            self._trainer._save(self._steps)
        return self._state.latest

    def _settle(self, decision: Decision) -> CompiledSteps:
        """Take the place, the mesh and the state that were decided."""
        if decision.differ:
            raise mismatch(decision, self._crew, self._compiled.lines if self._compiled else ())
        lost = tuple(map(rank_of, decision.lost))
        if self._crew.name not in decision.members:
            went_on = (
                "have finished. There is nothing left to do."
                if decision.ended
                else f"went on from step {decision.step} as workers {_listed(decision.ranks)}, "
                f"because {decision.why}. It must not go on by itself; start it again."
            )
            raise PeerLostError(
                f"Worker {rank_of(self._crew.name)} was left behind by the others, who {went_on}",
                ranks=(rank_of(self._crew.name),),
            )
        if len(decision.members) < self._trainer._fewest:
            self._give_up(decision, lost)
        joined = tuple(map(rank_of, decision.joined))
        self._trainer.workers = decision.ranks
        if decision.number:
            _LOG.warning(
                "After step %d: %s. Lost: %s; joined: %s; workers %s go on.",
                *(decision.step, decision.why, _listed(lost), _listed(joined)),
                _listed(decision.ranks),
            )
            self._change = WorldChange(
                decision.step, decision.ranks, lost, joined, decision.why, 0.0
            )
        axis = self._trainer._step.axis_name
        assert isinstance(axis, str)
        mesh = line_of(_devices(decision.ranks), axis)
        listening = [json.loads(text) for text in self._crew.published("gloo")]
        self._gloo = gloo.Made((host, port) for one in listening for host, port in one)
        self._compiled = CompiledSteps(self._trainer._step, mesh, self._crew)
        self._state.settle(decision, self._crew, mesh)
        return self._compiled

    def _give_up(self, decision: Decision, lost: tuple[int, ...]) -> None:
        saved = ""
        if self._trainer._path is not None:
            if self._crew.name == decision.members[0] and decision.step in self._state.held:
                self._trainer._save(decision.step)
            saved = f" The state after step {decision.step} is saved in {self._trainer._path}."
        raise PeerLostError(
            f"{len(decision.members)} workers are left ({_listed(decision.ranks)}), and "
            f"`min_workers` is {self._trainer._fewest}: {decision.why}.{saved}",
            ranks=lost,
        )

    def _train(self, decision: Decision, compiled: CompiledSteps) -> None:
        place_here = decision.members.index(self._crew.name)
        for step in range(decision.step, self._steps):
            self._crew.check()
            if step % _JOIN_EVERY == 0 and step > decision.step and self._crew.joins_at(step):
                raise RegroupError
            batch = self._batches(step, place_here, len(decision.members))
            call = compiled.prepared(step, self._state, batch)
            self._crew.check()
            state, metrics = self._finished_step(step, call, decision)
            self._state.keep(step + 1, state)
            self._gloo.settle()
            if self._change is not None:
                seconds = time.monotonic() - self._began
                self._trainer.changes.append(dataclasses.replace(self._change, seconds=seconds))
                self._change = None
            self._report_and_save(step + 1, metrics, first=place_here == 0)
        compiled.end(self._steps)

    def _finished_step(self, step: int, call: Callable[[], Any], decision: Decision) -> Any:
        try:
            return outcome_of(call, self._crew, self._trainer._timeout, f"step {step}")
        except (RuntimeError, ValueError) as error:  # what JAX raises for a broken connection
            # If nobody turns out to be lost, and it fails again, it is no fault of the others.
            failure = (step, frozenset(decision.members))
            if self._failed == failure:
                raise
            self._failed = failure
            reason = str(error).splitlines()[0][:200]
            self._crew.ask(f"step {step} failed on worker {rank_of(self._crew.name)}: {reason}")
            raise RegroupError from error

    def _report_and_save(self, finished: int, metrics: Any, first: bool) -> None:
        trainer = self._trainer
        trainer._report(finished, metrics)
        last = finished == self._steps
        if trainer._path is None or not first or last or finished % trainer._every:
            return
        if not self._crew.is_current():
            raise RegroupError
        try:
            trainer._save(finished)
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


def _devices(ranks: tuple[int, ...]) -> list[jax.Device]:
    return [d for rank in ranks for d in jax.devices() if d.process_index == rank]


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def _check_step(step: Any) -> None:
    if not isinstance(step, DataParallel):
        raise ValueError(
            f"`Elastic` expects a step made by `jc.data_parallel`; got {type(step).__name__}."
        )
    if isinstance(step.axis_name, tuple):
        raise ValueError(
            f"`Elastic` trains over one axis, along which workers may leave; the step has "
            f"{step.axis_name!r}."
        )
    if step.donate_argnums:
        raise ValueError(
            "`Elastic` goes back to the state before a step that others did not finish, so the "
            f"step must not donate it; got donate_argnums={step.donate_argnums}."
        )


def _check_numbers(fewest: Any, most: Any, timeout: Any, startup: Any, every: Any) -> None:
    whole = {"min_workers": fewest, "every": every} | (
        {} if most is None else {"max_workers": most}
    )
    for name, value in whole.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`Elastic` expects `{name}` to be an integer above 0; got {value!r}.")
    if most is not None and most < fewest:
        raise ValueError(f"`max_workers` ({most}) is below `min_workers` ({fewest}).")
    seconds = {"startup_seconds": startup} | (
        {} if timeout is None else {"timeout_seconds": timeout}
    )
    for name, value in seconds.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < np.inf:
            raise ValueError(
                f"`Elastic` expects `{name}` to be a number of seconds above 0; got {value!r}."
            )
