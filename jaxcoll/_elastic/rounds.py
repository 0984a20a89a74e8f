"""DiLoCo in an elastic run: replicas train by themselves, and meet when something is due."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._elastic.membership import Membership
from jaxcoll._elastic.replicated_state import ReplicatedState, Together
from jaxcoll._elastic.step_programs import StepPrograms
from jaxcoll._mesh.mesh import no_mesh
from jaxcoll._mesh.placement import place
from jaxcoll._train.diloco import DiLoCo
from jaxcoll._train.diloco_state import DiLoCoState, arrived


class RoundsState(ReplicatedState):
    """The state after the last two exchanges, and how far this worker has come since then.

    Each worker has the rows of its own replicas. A newcomer, and a run that restores a checkpoint,
    begin with the shared parameters and the optimizer state of one replica.
    """

    # By the step of an exchange, the state and metrics after the local steps that followed
    ahead: dict[int, tuple[DiLoCoState, Any]]

    def reset(self, state: Any, step: int) -> None:
        super().reset(self.alike(state), step)
        self.ahead = {}

    def keep(self, step: int, state: Any) -> None:
        super().keep(step, state)
        self.ahead = {k: found for k, found in self.ahead.items() if k in self.held}

    def settle(self, membership: Membership, mesh: Mesh, together: Together) -> None:
        # A worker that was in the middle of a round goes on from there, on its new devices.
        step = membership.generation.step
        ahead = self.ahead.get(step) if step in self.held else None
        super().settle(membership, mesh, together)
        self.ahead = {} if ahead is None else {step: jax.tree.map(np.asarray, ahead)}

    def like(self) -> Any:
        return self.alike(self.host(self.finished))

    def to_save(self, step: int) -> Any:
        return self.alike(self.host(step))

    def types(self, state: DiLoCoState) -> Any:
        return self.alike(state)

    def alike(self, state: DiLoCoState) -> DiLoCoState:
        """The state with no replica's parameters, and the optimizer state of the first one."""
        first = jax.tree.map(lambda x: x[:1], state.replicas[1])
        return dataclasses.replace(state, replicas=((), first))

    def compared(self, state: DiLoCoState) -> Any:
        return dataclasses.replace(state, replicas=((), ()))

    def placed(
        self, state: DiLoCoState, alike: DiLoCoState, membership: Membership, mesh: Mesh
    ) -> DiLoCoState:
        if membership.generation.step in self.held and jax.tree.leaves(state.replicas[0]):
            return state
        here = len(mesh.local_devices)
        rows = functools.partial(jax.tree.map, lambda x: np.repeat(x, here, 0))
        one = jax.tree.map(lambda x: np.asarray(x)[None], alike.shared)
        return dataclasses.replace(alike, replicas=(rows(one), rows(alike.replicas[1])))


class RoundPrograms(StepPrograms):
    """Local steps until an exchange is due, and the programs of these exchanges."""

    def __init__(
        self,
        report: Callable[[int, Any], None],
        train: DiLoCo,
        mesh: Mesh,
        membership: Membership,
    ) -> None:
        self._train = train.on(mesh)
        super().__init__(self._train.sum, mesh, membership)
        self._copies = NamedSharding(mesh, PartitionSpec())
        self._report = report

    def prepared(
        self, step: int, state: ReplicatedState, batches: Callable[[int], Any]
    ) -> tuple[int, Callable[[], Any]]:
        assert isinstance(state, RoundsState)
        now, metrics = state.ahead.get(step, (state.latest, None))
        due = self._train.schedule.sent
        while now.steps == step or not due(int(now.steps)):
            self._membership.check()
            self._membership.check_members()
            if now.steps > step:
                self._report(int(now.steps), metrics)
            now, metrics = self._train.local(now, batches(int(now.steps)))
            state.ahead[step] = now, metrics
        fragments = due(int(now.steps))
        with no_mesh():
            args = [self._placed(now, k) for k in fragments]
            lower = [functools.partial(self._twin.lower, *each) for each in args]
            programs = self.compiled(step, fragments, lower, jax.tree.leaves(args))
        self._exchanged = fragments, now, metrics
        calls = [functools.partial(p.compiled, *a) for p, a in zip(programs, args, strict=True)]
        return int(now.steps), lambda: [call() for call in calls]

    def finished(self, out: Any) -> Any:
        fragments, state, metrics = self._exchanged
        with no_mesh():
            for k, mean in zip(fragments, out, strict=True):
                state = self._train.applied(state, k, arrived(mean))
        return state, metrics

    def _placed(self, state: DiLoCoState, k: int) -> tuple[Any, ...]:
        rows, shared, steps = self._train.fragment(state, k)
        return rows, shared, place(steps, self._copies)
