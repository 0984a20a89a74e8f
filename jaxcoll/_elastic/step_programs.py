"""The programs of one generation of workers, which run none before all have compiled the same."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._dispatch.corruption_log import listening
from jaxcoll._dispatch.executable import Program, shared_program
from jaxcoll._dispatch.fingerprint import first_difference
from jaxcoll._elastic.generation import Decision, listed, rank_of
from jaxcoll._elastic.heartbeat import Doing
from jaxcoll._elastic.membership import Crew
from jaxcoll._elastic.replicated_state import HeldState
from jaxcoll._errors import ProgramMismatchError
from jaxcoll._mesh.mesh import no_mesh
from jaxcoll._mesh.placement import place
from jaxcoll._step.data_parallel import DataParallel

_POLL_SECONDS = 0.02
_SHOW_SECONDS = 1.0  # how long the lines of another worker's program are waited for


class CompiledSteps:
    """What a step is compiled to for each kind of batch.

    Law: a kind of batch that is new to one worker is new to all, in the same step. Whoever meets
    one says so by its beat before it compiles, and waits for all others to have compiled the same;
    one that repeats a program says so, too, so that neither waits for the other in vain.

    Attributes:
      lines: what this worker was about to do last, as workers compare it; (): nothing yet.
    """

    def __init__(self, step: DataParallel, mesh: Mesh, crew: Crew) -> None:
        self._twin = step.on(mesh)
        self._rows = NamedSharding(mesh, PartitionSpec(step.axis_name))
        self._devices = tuple(mesh.devices.flat)
        self._crew = crew
        self._known: dict[Any, Program] = {}
        self.lines: tuple[str, ...] = ()

    def prepared(self, step: int, state: HeldState, batch: Any) -> Callable[[], Any]:
        """The step on this batch, compiled and agreed upon, ready to be called.

        Raises:
          RegroupError: a member was lost over it, or brings another program.
          ValueError: what the step returns is no state like its argument.
        """
        with no_mesh():
            rows, held = place(batch, self._rows), state.latest
            kind = jax.tree.structure(rows), tuple(map(str, map(jax.typeof, jax.tree.leaves(rows))))
            program = self._known.get(kind)
            self.lines = program.lines if program else ()
            if program is None:
                self._crew.doing = Doing(self._crew.number, step, is_new=True)
                lowered = self._twin.lower(held, batch)
                state.check_result(lowered.out_info)
                called = getattr(self._twin, "__name__", "step")
                program = shared_program(lowered, called, jax.tree.leaves(rows), self._twin.told)
                self._known[kind], self.lines = program, program.lines
                self._crew.doing = Doing(self._crew.number, step, True, program.mark)
                self._crew.gather(f"program/{step}", program.mark, same=True)
            else:
                self._crew.doing = Doing(self._crew.number, step, False, program.mark)
            call = functools.partial(program.compiled, held, rows)
            if not self._twin.checksum:
                return call
            return functools.partial(listening, call, f"Step {step}", self._devices)

    def end(self, step: int) -> None:
        """Wait until all workers have taken their last step.

        Raises:
          RegroupError: a member was lost over it, or takes another.
        """
        self.lines = ("", "no program: its training ends here")
        self._crew.doing = Doing(self._crew.number, step, True, "end")
        self._crew.gather("finished", "", same=True)


def mismatch(decision: Decision, crew: Crew, mine: tuple[str, ...]) -> ProgramMismatchError:
    """The error for those who end, of whom each publishes its own lines."""
    show(decision, crew, mine)
    said = _sides(decision, crew)
    if min(map(len, said.values())) <= 2:  # one has no whole program to show
        said = {p: lines[1:2] or ["a program that is new to it"] for p, lines in said.items()}
    who = f"workers {listed(decision.ranks)} go" if decision.members else "none goes"
    return ProgramMismatchError(
        f"Workers bring different programs to step {decision.step}, and {who} on. The first "
        f"difference:\n{first_difference(said)}\nEvery worker needs the same step function, "
        "options and number of steps, rows of the same structure, shapes and dtypes in each step, "
        "the same version of JAX, its settings and `XLA_FLAGS`, and the same kind of processor."
    )


def show(decision: Decision, crew: Crew, mine: tuple[str, ...]) -> None:
    """Publish this worker's program, in lines, if it was found to differ from others'."""
    if crew.name in decision.differ and mine:
        crew.share(decision.number, f"lines/{crew.name}", json.dumps(mine))


def _sides(decision: Decision, crew: Crew) -> dict[int, list[str]]:
    """The programs that were found to differ, in lines, by process."""
    until = time.monotonic() + _SHOW_SECONDS
    while True:
        shown = crew.shared(decision.number, "lines")
        if not set(decision.differ) - set(shown) or time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    return {rank_of(name): json.loads(shown.get(name, "[]")) for name in decision.differ}
