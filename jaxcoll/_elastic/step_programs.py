"""The compiled programs of one generation. One runs only if all members have the same."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._dispatch.call import settings_of
from jaxcoll._dispatch.executable import Program
from jaxcoll._dispatch.fingerprint import first_difference, shared_program, unpacked
from jaxcoll._elastic.generation import listed, rank_of
from jaxcoll._elastic.heartbeat import StepStatus
from jaxcoll._elastic.membership import Membership
from jaxcoll._elastic.replicated_state import ReplicatedState
from jaxcoll._mesh.mesh import no_mesh
from jaxcoll._mesh.placement import check_rows, place
from jaxcoll._step.data_parallel import DataParallel
from jaxcoll.errors import ProgramMismatchError

_POLL_SECONDS = 0.02
_SHOW_SECONDS = 1.0  # timeout for the text of another worker's program


class StepPrograms:
    """The programs of a step, one for each kind of batch.

    Guarantee: a kind of batch that is new to one worker is new to all, in the same step. A worker
    with a new kind says so in its heartbeat before it compiles, and waits until all others have
    compiled the same program. A worker that repeats a program says so too; otherwise a mismatch
    could make others wait for ever.
    """

    def __init__(self, step: DataParallel, mesh: Mesh, membership: Membership) -> None:
        self._twin = step.on(mesh)
        self._rows = NamedSharding(mesh, PartitionSpec(step.axis_name))
        self._membership = membership
        self._known: dict[Any, Program] = {}
        self._last: tuple[Program, ...] | None = ()  # the last program; None: training has ended

    def prepared(
        self, step: int, state: ReplicatedState, batches: Callable[[int], Any]
    ) -> tuple[int, Callable[[], Any]]:
        """Prepare the next call; return the number of finished steps after it, and the call."""
        batch, replicas = batches(step), self._rows.mesh.size
        workers = replicas // len(self._rows.addressable_devices)
        check_rows(batch, "batch", replicas, workers, self._twin.axis_name)
        with no_mesh():
            rows, held = place(batch, self._rows), state.latest
            leaves = jax.tree.leaves(rows)

            def lower() -> jax.stages.Lowered:
                lowered = self._twin.lower(held, batch)
                state.check_result(lowered.out_info)
                return lowered

            kind = jax.tree.structure(rows), tuple(map(str, map(jax.typeof, leaves)))
            program = self.compiled(step, kind, lower, leaves)
        return step + 1, functools.partial(program.compiled, held, rows)

    def finished(self, out: Any) -> Any:
        """Return the state and the metrics, from the result of the call."""
        return out

    def compiled(
        self,
        step: int,
        kind: Any,
        lower: Callable[[], jax.stages.Lowered],
        leaves: Sequence[Any],
    ) -> Program:
        """Return the program for a kind of batch; if it is new, compare it with all members."""
        program = self._known.get(kind)
        self._begin(step, program, program is None)
        if program is None:
            name = getattr(self._twin, "__name__", "step")
            program = shared_program(lower(), name, leaves, settings_of(self._twin.options))
            self._known[kind] = program
            digest = self._begin(step, program, True)
            self._membership.gather(f"program/{step}", digest, same=True)
        return program

    def _begin(self, step: int, program: Program | None, is_new: bool) -> str:
        """Publish, by heartbeat, this step's program. Return its digest ("" before compilation)."""
        self._last = () if program is None else (program,)
        digest = "" if program is None else program.digest
        number = self._membership.generation.number
        self._membership.status = StepStatus(number, step, is_new, digest)
        return digest

    def lines(self) -> tuple[str, ...]:
        """Return the fingerprint of the program that this worker ran last; () if there is none."""
        if self._last is None:
            return "", "no program: its training ends here"
        return tuple(line for program in self._last for line in unpacked(program.lines))

    def end(self, step: int) -> None:
        """Wait until all workers have finished their last step."""
        self._last = None
        number = self._membership.generation.number
        self._membership.status = StepStatus(number, step, True, "end")
        self._membership.gather("finished", "", same=True)


def mismatch_error(membership: Membership) -> ProgramMismatchError:
    """Return the error for workers that must end because their programs differ."""
    generation, sides = membership.generation, _sides(membership)
    if min(map(len, sides.values())) <= 2:  # one worker has no whole program to show
        sides = {p: lines[1:2] or ["a program that is new to it"] for p, lines in sides.items()}
    who = f"workers {listed(generation.ranks)} continue" if generation.members else "all end"
    return ProgramMismatchError(
        f"Workers have different programs for step {generation.step}, and {who}. The first "
        f"difference:\n{first_difference(sides)}\nEvery worker needs the same step function, "
        "options and number of steps, rows of the same structure, shapes and dtypes in each step, "
        "the same version of JAX, its settings and `XLA_FLAGS`, and the same kind of processor."
    )


def publish_program(membership: Membership, mine: tuple[str, ...]) -> None:
    """Publish this worker's program, for `mismatch_error`, if it differs from the others'."""
    generation = membership.generation
    if membership.name in generation.differ and mine:
        membership.share(generation.number, f"lines/{membership.name}", json.dumps(mine))


def _sides(membership: Membership) -> dict[int, list[str]]:
    """Return the programs that differ, by process, once their workers have published them."""
    generation, until = membership.generation, time.monotonic() + _SHOW_SECONDS
    while set(generation.differ) - set(shown := membership.shared(generation.number, "lines")):
        if time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    return {rank_of(name): json.loads(shown.get(name, "[]")) for name in generation.differ}
