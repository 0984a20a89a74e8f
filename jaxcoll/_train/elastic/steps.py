"""The calls of a step in one generation of an elastic run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxcoll._runtime.call import Call, describe_kind
from jaxcoll._step.mesh.mesh import no_mesh
from jaxcoll._step.step import DataParallel
from jaxcoll._train.elastic.membership import Membership
from jaxcoll._train.elastic.replicated_state import ReplicatedState


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
