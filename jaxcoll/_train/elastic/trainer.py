"""`Elastic`: training that continues with the surviving workers when others die."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcoll._compat.coordination import StoreUnreachableError, store
from jaxcoll._compat.settings import boundary
from jaxcoll._job.coordinator_proxy import give_up_coordinator, when_coordinator_is_lost
from jaxcoll._job.initialize import outlives_processes
from jaxcoll._job.key_value import LocalKeys
from jaxcoll._plan.checks import count, positive, seconds
from jaxcoll._plan.packs.leaves import refuse_tied
from jaxcoll._runtime.watchdog import Watchdog, watchdog
from jaxcoll._step.mesh.placement import host_array
from jaxcoll._step.step import DataParallel
from jaxcoll._train.diloco import DiLoCo, check_state
from jaxcoll._train.elastic.generation import WorldChange
from jaxcoll._train.elastic.membership import Membership
from jaxcoll._train.elastic.replicated_state import ReplicatedState
from jaxcoll._train.elastic.residuals import find_residuals
from jaxcoll._train.elastic.rows import convert_batches, describe_source
from jaxcoll._train.elastic.run import Job, Run
from jaxcoll._train.elastic.steps import Rounds, RoundsState, Steps
from jaxcoll.errors import DeadlineExceededError, PeerLostError

_runs = itertools.count()


class Elastic:
    """A training loop that continues with the surviving workers.

    Guarantee: every worker holds the whole state after each of the last two steps. When workers
    die, stop or miss a deadline, the others agree on the last step that all of them finished, build
    a mesh of their devices, and continue from there. Their bits are equal, which is checked, and
    equal to those of a run that had the smaller world from that step on. Means are then over fewer
    replicas.

    A worker that was restarted, or that waits because of `max_workers`, joins at the next multiple
    of ten steps, or when another is lost, and receives the state. JAX fixes the number of processes
    when a job starts, so no more than that can train at once.

    A residual (`jc.compression.residual`) in the state is divided among workers by replica.
    Survivors keep their part, a newcomer starts with zeros, and a checkpoint holds the sum, which a
    restored run divides again. So the sum of all gradients is what has been exchanged, plus the
    residuals of all workers, plus the residuals of lost workers, which `changes` estimates.

    Args:
      step: a `jc.data_parallel` step of `(state, batch)` that returns `(state, metrics)`, over one
        axis, without donation. Or the result of `jc.diloco`: then workers synchronize, and notice
        a loss, at its exchanges, and a newcomer starts from the shared parameters.
      state: a pytree of arrays, complete and equal on all workers, and new residuals; or the state
        of DiLoCo.
      min_workers: with fewer workers, the run saves the state and raises `PeerLostError`.
      max_workers: workers beyond this number wait until they are needed. None: all train.
      timeout_seconds: timeout of one step, without compilation. Workers that miss it are dropped.
        The step's own `timeout_seconds` counts, too. None: no limit; then a worker that is stopped
        stops all.
      startup_timeout_seconds: timeout for live workers to meet, at the start and after a change,
        and to write the last checkpoint. Compilation and checkpoint must each fit in it.
      checkpoint: a file. A run starts from the state in it, and the first worker writes it. An
        older state never replaces a newer one. No worker returns before the last state is written;
        if the first worker dies or cannot write, the next one does.
      every: number of steps between two checkpoints. At each, and at the end, all workers compare
        their states bit by bit. Workers that differ from the majority end with
        `ReplicaDivergenceError`; without a majority all do.
      report: called on every worker after each step, with the number of finished steps and the
        metrics. A step that had to be repeated is reported again.

    Attributes:
      changes: a `WorldChange` for each change of the world, in order.
      finished: number of finished steps.
      workers: process numbers of the present workers, in the order of the mesh.

    Raises:
      ValueError: an argument is invalid; the step does not fit; or, with several processes,
        `jax_enable_recoverability` is off, so JAX would end all processes when one dies.

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
        refuse_tied(state, "Elastic")
        axis = _check_axis(step, state)
        fewest = positive("Elastic", "min_workers", min_workers)
        most = None if max_workers is None else positive("Elastic", "max_workers", max_workers)
        if most is not None and most < fewest:
            raise ValueError(f"`max_workers` ({most}) is below `min_workers` ({fewest}).")
        if timeout_seconds is not None:
            timeout_seconds = seconds("Elastic", "timeout_seconds", timeout_seconds)
        report = report or (lambda step, metrics: None)
        if isinstance(step, DiLoCo):
            calls, held = functools.partial(Rounds, report, step), RoundsState(state)
            self._round = step.every
        else:
            calls = functools.partial(Steps, step)
            # With the types that the step returns, which files and other workers have too.
            held = ReplicatedState(jax.tree.map(_convert_leaf, state))
            self._round = 1
        self._job = Job(
            axis,
            calls,
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
        """Number of finished steps."""
        return self._job.state.finished

    @boundary
    def run(self, batches: Any, steps: int) -> Any:
        """Train until `steps` steps are finished.

        Args:
          batches: `jc.batches(rows, batch_size)`, in the order of its seed; a list of whole
            batches, repeated; a function of the step (from 0) that returns the whole batch, of
            which each worker takes its rows; or a function of the step, this worker's index and
            the number of workers that returns this worker's rows, equally many on every worker.
            After a change the function is called again for the same step, with the new numbers.
          steps: total number of steps, including those of the checkpoint; for DiLoCo, a multiple
            of its `every`.

        Returns:
          The state, replicated over the workers that reached the end; of residuals each worker has
          its own part. None on a worker that never joined.

        Raises:
          DeadlineExceededError: a worker did not begin within `startup_timeout_seconds`; or a step
            was late 20 times in a row though no worker is lost, and the state was saved if there is
            a file.
          PeerLostError: too few workers are left, the coordinator died or is stopped, or the others
            dropped this worker. Except in the last case the state was saved, if there is a file.
          ReplicaDivergenceError: workers start with different states; or, later, this worker's
            state differs from the majority's, or there is no majority.
          ProgramMismatchError: workers differ in the structure of the state, in the seed or source
            of `jc.batches`, in a list of batches, or in the program of a step. A newcomer that
            differs ends alone.
          ValueError: `batches` is something else, or its rows do not divide evenly; the step does
            not return a state like its argument; or `steps` does not end a round of DiLoCo.
          OSError: this worker could not write the last checkpoint.
        """
        job, rows, source = self._job, convert_batches(batches), describe_source(batches)
        steps = count("steps", "", steps)
        if steps % self._round:
            raise ValueError(
                f"`steps` must be a multiple of the {self._round} steps between two exchanges of "
                f"`diloco`, or the last round would be lost; got {steps}."
            )
        if job.file is not None:
            job.state.restore(job.file)
        keys = store()
        if keys is not None and not outlives_processes():
            raise ValueError(
                "`Elastic` needs a job that survives the loss of a process: start it with "
                "`jc.initialize()`, or call `jax.config.update('jax_enable_recoverability', True)` "
                "before `jax.distributed.initialize`."
            )
        patience = job.timeout or job.startup
        number, root = next(_runs), "jaxcoll/elastic"
        limits = {"patience": patience, "startup": job.startup, "most": job.most}
        after = f"{root}/{number - 1}"  # the previous run, which recorded who finished it
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
            raise self._save_without_coordinator() from None
        finally:
            if keys is None:
                here.end()

    def _save_without_coordinator(self) -> PeerLostError:
        give_up_coordinator()
        # Workers that are not cut off may have continued. A newer state of theirs stays.
        saved = self._job.save()
        return PeerLostError(
            "The coordinator died, is stopped, or is cut off from this worker, so the workers can "
            f"no longer agree on anything. {saved} Start the job again, unless others continue.",
        )


def _convert_leaf(x: Any) -> Any:
    return jax.device_put(x) if isinstance(x, int | float | complex) else host_array(x)


def _exchange_devices() -> None:
    """Make JAX exchange devices between processes, which it does on their first use."""
    try:
        jax.devices()
    except RuntimeError as error:
        # JAX wraps errors of its device factory; the original one is from `startup`.
        if isinstance(error.__context__, DeadlineExceededError | PeerLostError):
            raise error.__context__ from None
        raise


def _check_axis(step: Any, state: Any) -> str:
    """Check that a step and its state suit `Elastic`, and return the step's axis."""
    if not isinstance(step, DataParallel | DiLoCo):
        raise ValueError(
            "`Elastic` expects a step made by `jc.data_parallel` or `jc.diloco`, and "
            "then its state, as in `jc.Elastic(jc.data_parallel(step), state)`; got "
            f"{type(step).__name__}."
        )
    if isinstance(step.axis_name, tuple):
        raise ValueError(
            "`Elastic` trains over one mesh axis, along which workers may leave; the step has "
            f"{step.axis_name!r}."
        )
    if isinstance(step, DiLoCo):
        check_state(state, len(jax.local_devices()))
        return step.axis_name
    try:
        batch = step.signature.call((state, np.empty(1)), {}).batch
    except TypeError:
        batch = ()
    if batch != (1,):
        raise ValueError(
            "`Elastic` expects a step of `(state, batch)` and passes each worker its rows of the "
            f"batch; this one is {step.signature}. Pass several arrays as one argument, which the "
            "step unpacks: `x, y = batch`."
        )
    if step.donate_argnums:
        raise ValueError(
            "`Elastic` returns to the previous state when others did not finish a step, so the "
            f"step must not donate it; got donate_argnums={step.donate_argnums}."
        )
    for residual in find_residuals(state):
        if residual.axes != (step.axis_name,):
            raise ValueError(
                f"`Elastic`: the state has a residual over {', '.join(map(repr, residual.axes))}, "
                f"but the step's axis is {step.axis_name!r}: make it with "
                f"`jc.compression.residual(params, {step.axis_name!r})`."
            )
    return step.axis_name
