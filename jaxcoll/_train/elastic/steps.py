"""The calls of a step in one generation of an elastic run.

In those of DiLoCo, replicas train locally, and exchange at the end of each round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._runtime.call import Call, describe_kind
from jaxcoll._step.mesh.mesh import no_mesh
from jaxcoll._step.step import DataParallel
from jaxcoll._train.diloco import DiLoCo, DiLoCoState
from jaxcoll._train.elastic.membership import Membership
from jaxcoll._train.elastic.replicated_state import Offers, ReplicatedState, Together


class Prepared(NamedTuple):
    """The next call that all members make."""

    finished: int  # number of finished steps after it
    call: Call
    # Returns the state and the metrics, from its result; None: that is these
    finish: Callable[[Any, Call], Any] | None


class Steps:
    """The calls of a step on the devices of one generation."""

    def __init__(self, step: DataParallel, mesh: Mesh, membership: Membership) -> None:
        self._step = step.on(mesh)
        self._membership = membership
        self._checked: set[Any] = set()  # kinds of batches whose results were checked

    def prepare(self, step: int, state: ReplicatedState, batches: Callable[[int], Any]) -> Prepared:
        """Prepare the call after so many finished steps."""
        with no_mesh():
            call, checked = self._step.prepare(state.latest, batches(step))
            if (kind := describe_kind(call.args)) not in self._checked:
                state.check_result(call.program.trace(*call.args).out_info)
                self._checked.add(kind)
        return Prepared(step + 1, call, checked)


class RoundsState(ReplicatedState):
    """The state after the last two exchanges, and this worker's progress since then.

    Each worker has the rows of its own replicas. A newcomer, or a run that restores a checkpoint,
    starts with the shared parameters and the optimizer state of one replica.
    """

    # By the step of an exchange: the state and metrics after the local steps that followed
    ahead: dict[int, tuple[DiLoCoState, Any]]

    def reset(self, state: Any, step: int) -> None:
        super().reset(self.select_alike(state), step)
        self.ahead = {}

    def keep(self, step: int, state: Any) -> None:
        super().keep(step, state)
        self.ahead = {k: progress for k, progress in self.ahead.items() if k in self.held}

    def settle(
        self, state: Any, offers: Offers, membership: Membership, mesh: Mesh, together: Together
    ) -> None:
        # A worker in the middle of a round continues from there, on its new devices.
        step = membership.generation.step
        ahead = self.ahead.get(step) if step in self.held else None
        super().settle(state, offers, membership, mesh, together)
        self.ahead = {}
        if ahead is not None:
            progress, metrics = jax.tree.map(np.asarray, ahead)
            self.ahead[step] = self.restore_weak_types(progress), metrics

    def like(self) -> Any:
        return self.select_alike(self.copy_to_host(self.finished))

    def collect(self, step: int) -> Any:
        return self.select_alike(self.copy_to_host(step))

    def select_types(self, state: DiLoCoState) -> Any:
        return self.select_alike(state)

    def select_alike(self, state: DiLoCoState) -> DiLoCoState:
        """Drop replicas' parameters, and keep the optimizer state of the first."""
        first = jax.tree.map(lambda x: x[:1], state.replicas[1])
        return dataclasses.replace(state, replicas=((), first))

    def select_compared(self, state: DiLoCoState) -> Any:
        return dataclasses.replace(state, replicas=((), ()))

    def place_state(
        self,
        state: DiLoCoState,
        alike: DiLoCoState,
        held: dict[str, str],
        membership: Membership,
        mesh: Mesh,
    ) -> DiLoCoState:
        if membership.generation.step in self.held and jax.tree.leaves(state.replicas[0]):
            return self.restore_weak_types(state)
        here = len(mesh.local_devices)
        rows = functools.partial(jax.tree.map, lambda x: np.repeat(x, here, 0))
        one = jax.tree.map(lambda x: np.asarray(x)[None], alike.shared)
        replicas = rows(one), rows(alike.replicas[1])
        return self.restore_weak_types(dataclasses.replace(alike, replicas=replicas))


class Rounds(Steps):
    """The local steps of a round, and the call of the exchange that ends it."""

    def __init__(
        self,
        report: Callable[[int, Any], None],
        train: DiLoCo,
        mesh: Mesh,
        membership: Membership,
    ) -> None:
        self._train, self._report = train.on(mesh), report
        super().__init__(self._train.sum, mesh, membership)

    def prepare(self, step: int, state: ReplicatedState, batches: Callable[[int], Any]) -> Prepared:
        assert isinstance(state, RoundsState)
        now, metrics = state.ahead.get(step, (state.latest, None))
        # The steps of a round, or those that are left of it: after a change of the world, `ahead`
        # has the others. At `step`, where the last round ended, the next one begins.
        while now.steps == step or now.steps % self._train.every:
            self._membership.check()
            # The last step of a round is reported after the exchange, without which it does not
            # count.
            if now.steps > step:
                self._report(int(now.steps), metrics)
            now, metrics = self._train.local(now, batches(int(now.steps)))
            state.ahead[step] = now, metrics
        with no_mesh():
            call, checked = self._step.prepare(*self._train.arguments(now))

        def finish(mean: Any, call: Call) -> Any:
            mean = mean if checked is None else checked(mean, call)
            return self._train.apply_mean(now, mean), metrics

        return Prepared(int(now.steps), call, finish)
