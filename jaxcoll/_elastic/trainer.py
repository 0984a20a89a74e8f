"""`Elastic`: training that continues with the surviving workers when others die."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxcoll._cluster.coordinator_proxy import give_up_coordinator, when_coordinator_is_lost
from jaxcoll._cluster.initialize import outlives_processes
from jaxcoll._cluster.key_value import LocalKeys
from jaxcoll._compat.coordination import StoreUnreachableError, store
from jaxcoll._compat.settings import boundary
from jaxcoll._dispatch.watchdog import Watchdog, watchdog
from jaxcoll._elastic.generation import WorldChange
from jaxcoll._elastic.membership import Membership
from jaxcoll._elastic.replicated_state import ReplicatedState
from jaxcoll._elastic.residuals import residuals_in
from jaxcoll._elastic.rounds import RoundPrograms, RoundsState
from jaxcoll._elastic.rows import rows_of, source_of
from jaxcoll._elastic.run import LAST_PATIENCE, Job, Run
from jaxcoll._elastic.step_programs import StepPrograms
from jaxcoll._mesh.placement import host_array
from jaxcoll._plan.checks import count, positive, seconds
from jaxcoll._step.data_parallel import DataParallel
from jaxcoll._train.diloco import DiLoCo, check_state
from jaxcoll.errors import DeadlineExceededError, PeerLostError

_runs = itertools.count()


class Elastic:
    """A training loop that continues with the surviving workers.

    Guarantee: every worker holds the whole state after each of the last two steps. When workers
    die, stop or miss a deadline, the others agree on the last step that all of them finished, build
    a mesh of their own devices, and continue from there: with bits equal on all of them, which is
    checked, and equal to those of a run that had the smaller world from that step. A mean is then a
    mean over fewer replicas.

    A worker that was restarted, or that waits because of `max_workers`, is taken in at the next
    multiple of ten steps, or when another is lost, and receives the state. JAX fixes the number of
    processes when a job starts, so no more than that can work at once.

    Of a residual (`jc.compression.residual`) in the state each worker has its own replicas' part.
    Survivors keep theirs, a newcomer begins with nothing, and a checkpoint holds the sum of all,
    which is dealt out again. So what arrived, and the residuals of all workers, and what lost
    workers took along, are together the sum of the gradients; of the latter `changes` has the size.

    Args:
      step: a `jc.data_parallel` step of `(state, batch)` that returns `(state, metrics)`, over one
        axis, and donates nothing. Or what `jc.diloco` returns: workers then meet, and notice a
        loss, at its exchanges, and a newcomer begins at the shared parameters.
      state: a pytree of arrays, complete and equal on all workers, and of new residuals; or that
        of DiLoCo.
      min_workers: fewer workers than these save the state and raise `PeerLostError`.
      max_workers: more workers than these wait until they are needed. None: all work.
      timeout_seconds: of one step, without its compilation. Workers that miss it are dropped from
        the run. None: no limit; a worker that is stopped then stops all.
      startup_timeout_seconds: of the first meeting, of those after a change, and of the last
        checkpoint, while all live; it must exceed the time of a compilation and of a checkpoint.
      checkpoint: a file. A run begins with the state in it, and the first worker writes it. A newer
        state is never replaced by an older one, and no worker returns before the last one is
        written: if the first worker dies meanwhile or cannot write, the next one does.
      every: steps between two checkpoints. At each, and at the end, all workers compare their
        states bit by bit. Workers that differ from the majority end with `ReplicaDivergenceError`;
        without a majority all do.
      report: called on every worker after each step with the number of finished steps and the
        metrics. A step that had to be done again is reported again.

    Attributes:
      changes: a `WorldChange` for each change of the world, in order.
      finished: steps that are finished.
      workers: process numbers of the present workers, in the order of the mesh.

    Raises:
      ValueError: an argument is invalid, the step does not fit, or, with several processes,
        `jax_enable_recoverability` is off, so that JAX would end all processes when one dies.

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
        step: DataParallel | DiLoCo,
        state: Any,
        *,
        min_workers: int = 1,
        max_workers: int | None = None,
        timeout_seconds: float | None = 60.0,
        startup_timeout_seconds: float = 300.0,
        checkpoint: str | Path | None = None,
        every: int = 100,
        report: Callable[[int, Any], None] | None = None,
    ) -> None:
        axis = _checked_axis(step, state)
        fewest = positive("Elastic", "min_workers", min_workers)
        most = None if max_workers is None else positive("Elastic", "max_workers", max_workers)
        if most is not None and most < fewest:
            raise ValueError(f"`max_workers` ({most}) is below `min_workers` ({fewest}).")
        if timeout_seconds is not None:
            timeout_seconds = seconds("Elastic", "timeout_seconds", timeout_seconds)
        report = report or (lambda step, metrics: None)
        if isinstance(step, DiLoCo):
            programs, held = functools.partial(RoundPrograms, report, step), RoundsState(state)
            self._round = step.every
        else:
            programs = functools.partial(StepPrograms, step)
            # In the types that the step returns, so that a file, and others, have the same.
            held = ReplicatedState(jax.tree.map(host_array, state))
            self._round = 1
        self._job = Job(
            axis,
            programs,
            held,
            fewest=fewest,
            most=most,
            timeout=timeout_seconds,
            startup=seconds("Elastic", "startup_timeout_seconds", startup_timeout_seconds),
            file=None if checkpoint is None else Path(checkpoint),
            every=positive("Elastic", "every", every),
            report=report,
        )

    @property
    def changes(self) -> list[WorldChange]:
        """Each change of the world, in order."""
        return self._job.changes

    @property
    def workers(self) -> tuple[int, ...]:
        """Process numbers of the present workers, in the order of the mesh."""
        return self._job.workers

    @property
    def finished(self) -> int:
        """Steps that are finished."""
        return self._job.state.finished

    @boundary
    def run(self, batches: Any, steps: int) -> Any:
        """Train until `steps` are finished.

        Args:
          batches: `jc.batches(rows, batch_size)`, whose seed says the order; a list of whole
            batches, over and over; a function of the step (from 0) that returns its batch, of
            which each worker takes its rows; or one of the step, this worker's place among the
            workers and how many there are, which returns its rows, equally many on every worker.
            After a change batches are asked for again, for another place and number.
          steps: in all, those of the checkpoint included; of DiLoCo, in rounds of `every`.

        Returns:
          The state, replicated over the workers that reached the end, residuals as each of them
          has its own; None on a worker that was never taken in.

        Raises:
          DeadlineExceededError: a worker did not begin within `startup_timeout_seconds`; or a step
            was late 20 times in a row though nobody is lost. The state was saved then, if there is
            a file.
          PeerLostError: too few workers are left, the coordinator died or is stopped, or the others
            dropped this worker. Except in the last case the state was saved, if there is a file.
          ReplicaDivergenceError: workers start with different states; or later this worker's
            differs from that of most others, or most do not agree.
          ProgramMismatchError: their states have different structures, their `jc.batches` another
            seed or source, or their lists other batches; or they bring different programs to a
            step. A worker that comes later ends alone for it.
          ValueError: `batches` are something else or do not divide, the step does not return a
            state like its argument, or `steps` do not end a round of DiLoCo.
          OSError: this worker could not write the last checkpoint.
        """
        job, rows, source = self._job, rows_of(batches), source_of(batches)
        steps = count("steps", "", steps)
        if steps % self._round:
            raise ValueError(
                f"`steps` must be a multiple of the {self._round} steps between two exchanges of "
                f"`diloco`, so that nothing of the last round is lost; got {steps}."
            )
        if job.file is not None:
            job.state.restore(job.file)
        keys = store()
        if keys is not None and not outlives_processes():
            raise ValueError(
                "`Elastic` needs a world that outlives its processes: start it with "
                "`jc.initialize()`, or set `jax.config.update('jax_enable_recoverability', True)` "
                "before `jax.distributed.initialize`."
            )
        patience = job.timeout or job.startup
        number, root = next(_runs), "jaxcoll/elastic"
        limits = {"patience": patience, "startup": job.startup, "most": job.most}
        after = f"{root}/{number - 1}"  # where who finished it is written
        here = watchdog() or Watchdog(LocalKeys())
        try:
            with contextlib.closing(
                Membership(here, f"{root}/{number}", after=after, **limits)
            ) as membership:
                membership.meet()
                _exchange_devices()
                with when_coordinator_is_lost(membership.lose_coordinator, patience):
                    return Run(job, membership, rows, source, steps).run()
        except StoreUnreachableError:
            raise self._saved_without_coordinator() from None
        finally:
            if keys is None:
                here.end()

    def _saved_without_coordinator(self) -> PeerLostError:
        """Save the state; the error that says so."""
        give_up_coordinator()
        state, file = self._job.state, self._job.file
        saved = "There is no `checkpoint` to save the state to."
        if file is not None:
            # Workers that are not cut off may have gone on. What they saved is newer and stays.
            try:
                step = state.save(file, self.finished, LAST_PATIENCE)
                saved = f"The state after step {step} is saved in {file}."
            except OSError as error:
                saved = f"The state after step {self.finished} could not be saved: {error}."
        return PeerLostError(
            "The coordinator died, is stopped, or is cut off from this worker: the workers cannot "
            f"agree on anything any more. {saved} Start the job again, unless others go on.",
        )


def _exchange_devices() -> None:
    """Have JAX tell all processes of all devices, which it does when they are first asked for."""
    try:
        jax.devices()
    except RuntimeError as error:
        # JAX wraps whatever its factory of devices raises; the cause is ours (startup).
        if isinstance(error.__context__, DeadlineExceededError | PeerLostError):
            raise error.__context__ from None
        raise


def _checked_axis(step: Any, state: Any) -> str:
    """The axis of a step that fits, and has a state that does."""
    if not isinstance(step, DataParallel | DiLoCo):
        raise ValueError(
            "`Elastic` expects a step made by `jc.data_parallel`, or by `jc.diloco`, and "
            "then its state, as in `jc.Elastic(jc.data_parallel(step), state)`; got "
            f"{type(step).__name__}."
        )
    if isinstance(step.axis_name, tuple):
        raise ValueError(
            f"`Elastic` trains over one axis, along which workers may leave; the step has "
            f"{step.axis_name!r}."
        )
    if isinstance(step, DiLoCo):
        check_state(state, len(jax.local_devices()))
        return step.axis_name
    try:
        batch = step.signature.call((state, None), {}).batch
    except TypeError:
        batch = ()
    if batch != (1,):
        raise ValueError(
            "`Elastic` calls a step of `(state, batch)` and gives each worker its rows of the "
            f"batch; this one is {step.signature}. Arrays that belong together are one argument, "
            "which the step unpacks: `x, y = batch`."
        )
    if step.donate_argnums:
        raise ValueError(
            "`Elastic` goes back to the state before a step that others did not finish, so the "
            f"step must not donate it; got donate_argnums={step.donate_argnums}."
        )
    for residual in residuals_in(state):
        if residual.axes != (step.axis_name,):
            raise ValueError(
                f"`Elastic`: the state has a residual over {', '.join(map(repr, residual.axes))}, "
                f"and the step's axis is {step.axis_name!r}: make it with "
                f"`jc.compression.residual(params, {step.axis_name!r})`."
            )
    return step.axis_name
