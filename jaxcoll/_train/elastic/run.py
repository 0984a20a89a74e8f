"""One run of `Elastic`: one generation after another, until the steps are finished."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jax.sharding import Mesh

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job import gloo_sockets
from jaxcoll._job.timing import LAST_LOCK_SECONDS
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.dispatch import run
from jaxcoll._step.mesh.mesh import make_line
from jaxcoll._train.elastic.comparison import check_agreed
from jaxcoll._train.elastic.connections import Connections, may_be_broken
from jaxcoll._train.elastic.generation import (
    Generation,
    RegroupError,
    WorldChange,
    describe,
    list_ranks,
    parse_rank,
)
from jaxcoll._train.elastic.membership import Membership
from jaxcoll._train.elastic.replicated_state import ReplicatedState
from jaxcoll._train.elastic.steps import Steps
from jaxcoll._train.elastic.writers import Checkpoints
from jaxcoll.errors import (
    DeadlineExceededError,
    PeerLostError,
    ProgramMismatchError,
    ReplicaDivergenceError,
)

_LOG = logging.getLogger("jaxcoll")
_JOIN_EVERY = 10  # steps between two checks for workers that wait to join
MOST_ATTEMPTS = 20
"""Number of late attempts at one step, with all workers alive, after which a run gives up."""

_OF_OTHERS = DeadlineExceededError, PeerLostError, ProgramMismatchError
"""Errors of a call that another worker may have caused."""


@dataclasses.dataclass
class Job:
    """The arguments of `Elastic`, and the progress of its runs."""

    axis: str
    calls: Callable[[Mesh, Membership], Steps]
    state: ReplicatedState
    fewest: int
    most: int | None
    timeout: float | None
    startup: float
    file: Path | None
    every: int
    report: Callable[[int, Any], None]
    changes: list[WorldChange] = dataclasses.field(default_factory=list)
    workers: tuple[int, ...] = ()

    def save(self) -> str:
        """Write this worker's last state, unless the file has a later one, and say so."""
        if self.file is None:
            return "The state was not saved, because there is no `checkpoint` file."
        try:
            step = self.state.prepare_save(self.file, self.state.finished, LAST_LOCK_SECONDS)()
        except OSError as error:
            return f"The state after step {self.state.finished} could not be saved: {error}."
        return f"The state after step {step} is saved in {self.file}."


class Run:
    """One call of `Elastic.run`."""

    def __init__(
        self, job: Job, membership: Membership, batches: Any, source: str, steps: int
    ) -> None:
        self._job, self._membership = job, membership
        self._batches, self._source, self._steps = batches, source, steps
        self._state = job.state
        # Step and workers of the last attempt, and how many attempts in a row had the same
        self._attempted: tuple[int, frozenset[str]] = 0, frozenset()
        self._attempts = 0
        self._failed: Exception | None = None  # this worker's error in the last attempt
        self._failing: Exception | None = None  # this worker's error in the present attempt
        self._began = 0.0
        self._changes: list[tuple[float, WorldChange]] = []  # still without durations
        self._checkpoints = Checkpoints(membership, job.state, job.file, job.every, job.startup)
        self._is_saved = False  # the last state, or others have a later one

    def run(self) -> Any:
        """Train, and return the state. Save it before any error, unless it may be wrong."""
        begun = self._state.finished
        try:
            return self._run()
        except (StoreUnreachableError, ReplicaDivergenceError):  # for the first, the caller saves
            raise
        except BaseException as error:
            if self._job.file and self._state.finished > begun and not self._is_saved:
                error.add_note(self._job.save())
            raise

    def _run(self) -> Any:
        self._membership.reconnects = may_be_broken()
        if self._membership.enter(self._state.finished, self._state.term) is None:
            return None
        self._began = time.monotonic()
        try:
            while not (self._generation.ended and self._state.finished >= self._steps):
                try:
                    self._announce()
                    self._check_place()
                    with Connections(self._membership) as connections:
                        self._train(self._settle(connections), connections)
                        self._end()
                    break
                except RegroupError:
                    self._began = time.monotonic()
                    generation = self._membership.regroup(
                        self._state.finished, self._state.held, self._state.residual_norm
                    )
                    attempted = generation.step, frozenset(generation.members)
                    self._attempts = 1 + (attempted == self._attempted) * self._attempts
                    self._attempted = attempted
                    self._failed, self._failing = self._failing, None
        finally:
            self._date_changes()
            self._checkpoints.close()
        return self._state.latest

    @property
    def _generation(self) -> Generation:
        return self._membership.generation

    def _end(self) -> None:
        """Wait until all workers agree on the last state and one has written it, if to a file."""
        self._membership.gather("finished", "")
        self._compare()
        writer, failure = self._checkpoints.save_last(self._state.finished)
        if writer or not self._checkpoints.writers:
            self._membership.finish()
        if failure:
            raise failure

    def _compare(self) -> None:
        self._state.compare(self._membership)
        if self._checkpoints.writers:
            self._state.add_up(self._membership, self._together)

    def _date_changes(self) -> None:
        for began, change in self._changes:
            seconds = time.monotonic() - began
            self._job.changes.append(dataclasses.replace(change, seconds=seconds))
        self._changes.clear()

    def _settle(self, connections: Connections) -> Steps:
        """Set up this worker for the generation: connections, mesh, calls and state.

        Members say everything in one exchange, because a round trip of all takes long.
        """
        membership, start = self._membership, not self._generation.number
        state, offer = self._state.offer(self._generation.step)
        offer["listening"] = gloo_sockets.find_listeners()
        offer["source"] = f"{self._source or 'a function'}, {self._steps} steps"
        offer["every"] = self._checkpoints.own_every
        offers = membership.gather("start", offer)
        sources = {name: offer["source"] for name, offer in offers.items()}
        self._checkpoints.choose({name: offer["every"] for name, offer in offers.items()})
        connections.begin(offer["listening"] for offer in offers.values())
        ranks, devices = self._job.workers, connections.devices
        ours = [d for rank in ranks for d in devices if d.process_index == rank]
        mesh = make_line(ours, self._job.axis)
        self._state.settle(state, offers, membership, mesh, self._together)
        check_agreed(sources, membership, _batches_error, start, "source")
        connections.forget_others()
        return self._job.calls(mesh, membership)

    def _check_place(self) -> None:
        """End this worker if the generation cannot train, or does so without this worker."""
        job, name = self._job, self._membership.name
        generation, ranks = self._generation, list_ranks(self._generation.ranks)
        if generation.ends_for_its_program(name):
            who = f"Workers {ranks} continue." if generation.members else "All workers end."
            raise ProgramMismatchError(f"{generation.mismatch} {who}")
        if name in generation.members:
            self._state.term = generation.term
        few = len(generation.members) < job.fewest and generation.step < self._steps
        if few and not generation.ended:
            text = (
                f"Too few workers are left: {len(generation.ranks)} (rank {ranks}); `min_workers` "
                f"is {job.fewest}: {generation.why}."
            )
            self._give_up(PeerLostError(text, ranks=tuple(map(parse_rank, generation.lost))))
        if name not in generation.members:
            outcome = "they have finished, and nothing is left to do."
            if not generation.ended:
                outcome = (
                    f"they continued from step {generation.step} as workers {ranks}, because "
                    f"{generation.why}. Start this worker again; it must not continue alone."
                )
            self._is_saved = True
            raise PeerLostError(
                f"The other workers dropped worker {parse_rank(name)}: {outcome}",
                ranks=(parse_rank(name),),
            )
        if self._failed and self._attempts > 1:  # another attempt is pointless
            raise self._failed  # alone: the others may go on
        if self._attempts >= MOST_ATTEMPTS:
            text = (
                f"Workers {ranks} began the step after step {generation.step} {MOST_ATTEMPTS} "
                "times in a row and never finished it, though all are alive. The last time, "
                f"{generation.why}. A larger `timeout_seconds` waits longer."
            )
            self._give_up(DeadlineExceededError(text))

    def _announce(self) -> None:
        generation = self._generation
        if self._membership.name not in generation.members:
            return
        self._job.workers = generation.ranks
        if not generation.number:
            return
        lost, joined = (
            tuple(map(parse_rank, names)) for names in (generation.lost, generation.joined)
        )
        _LOG.warning(
            "After step %d: %s. Lost: %s; joined: %s; workers %s continue.",
            *(generation.step, generation.why, *map(list_ranks, (lost, joined, generation.ranks))),
        )
        residual = generation.residual if lost else 0.0
        if residual:
            text = "A residual with a norm of about %.3g was lost with each lost worker."
            _LOG.warning(text, residual)
        change = WorldChange(
            generation.step, generation.ranks, lost, joined, generation.why, 0.0, residual
        )
        self._changes.append((self._began, change))

    def _give_up(self, error: Exception) -> NoReturn:
        # Workers that cannot train still save together, even with a dropped one.
        every_of = self._membership.gather("every", self._checkpoints.own_every)
        self._checkpoints.choose(every_of)
        step = self._generation.step
        writer, failure = self._checkpoints.save_last(step)
        self._is_saved = True
        if writer and self._job.file:
            saved = f"The state after step {step} is saved in {self._job.file}."
            error.args = (f"{error} {saved}",)
        elif failure:
            error.args = (f"{error} The state could not be saved: {failure}.",)
        raise error

    def _train(self, calls: Steps, connections: Connections) -> None:
        generation = self._generation
        place_here, world = generation.members.index(self._membership.name), len(generation.members)

        def batches(at: int) -> Any:
            if (batch := self._batches(at, place_here, world)) is None:  # a forgotten `return`
                raise ValueError(f"`Elastic.run`: the function returned None for step {at}.")
            return batch

        before = step = generation.step
        while step < self._steps:
            self._membership.check()
            if step // _JOIN_EVERY > before // _JOIN_EVERY and self._membership.joins_at(step):
                raise RegroupError
            then, call, finish = calls.prepare(step, self._state, batches)
            self._membership.check()
            what = f"step {then - 1}"
            state, metrics = self._together(call, self._job.timeout, what, finish)
            self._state.keep(then, state)
            before, step = step, then
            connections.settle()
            self._date_changes()
            self._job.report(step, metrics)
            if step < self._steps and self._checkpoints.are_due(before, step):
                self._compare()
                self._checkpoints.save(step)  # `_end` saves the last state

    def _together(
        self,
        call: Call,
        seconds: float | None,
        what: str,
        finish: Callable[[Any, Call], Any] | None = None,
    ) -> Any:
        """Make a call with all members, within `seconds`; return `finish` of the result.

        Raises:
          RegroupError: the generation is over.
          StoreUnreachableError: the coordinator is lost.
          ReplicaDivergenceError: replicas differ where `jc.same` was called.
        """
        membership, limits = self._membership, (seconds, call.timeout_seconds)
        soonest = min(filter(None, limits), default=0)
        call = dataclasses.replace(
            call,
            name=what,
            options=call.options.replace(timeout_seconds=soonest),
            group=membership.group,
            compares=False,  # of the state, which was compared when the generation began
            meeting_seconds=self._job.startup,
        )
        try:
            result = run(call)
            return result if finish is None else finish(result, call)
        except (StoreUnreachableError, ReplicaDivergenceError):
            raise
        except (*_OF_OTHERS, RuntimeError, ValueError) as error:  # JAX raises the last two
            membership.check()
            late = isinstance(error, DeadlineExceededError)
            if isinstance(error, ProgramMismatchError):
                membership.mismatch = str(error)
            late = membership.request_regroup(self._reason(error, what), late)
            if not late and not isinstance(error, _OF_OTHERS):
                # If nobody is lost, and it fails again, the cause was not another worker.
                self._failing = error.with_traceback(None)  # a traceback keeps the step's arrays
            raise RegroupError from error

    def _reason(self, error: Exception, what: str) -> str:
        """Say for the other members why this one requests a new generation."""
        if isinstance(error, PeerLostError):
            return f"{describe(error.ranks)} ended"
        if isinstance(error, ProgramMismatchError):
            return "workers have different programs"
        name, lines = parse_rank(self._membership.name), str(error).strip().splitlines() or [""]
        if isinstance(error, DeadlineExceededError):
            return lines[0][:200].rstrip(".")
        return f"{what} failed on worker {name}: {lines[-1][:200]}"  # where a callback's error is


def _batches_error(sources: dict[str, str]) -> ProgramMismatchError:
    sides = "; ".join(f"worker {parse_rank(name)}: {source}" for name, source in sources.items())
    return ProgramMismatchError(
        f"Workers pass different batches or steps to `Elastic.run`: {sides}. Give all the same "
        "numbers, source and seed, not the time or the process number. A list must hold whole "
        "batches, and each worker takes its rows of them. To return only a worker's own rows, pass "
        "a function of three arguments: `lambda step, worker, workers: rows`."
    )
