"""Find the executions of each compiled program in a profile, and say what was not found."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxcoll._report.profile.backends import Backend, Executions, Program
from jaxcoll._report.profile.event_names import DONE, START, WHOLE, EventNames, event_names
from jaxcoll._report.profile.profile import Compiled, Profile
from jaxcoll._report.profile.rank_times import find_regular
from jaxcoll._report.report import Report


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compiled program that executions may belong to."""

    report: Report
    program: Compiled
    numbers: frozenset[int]  # of its executions' programs; empty if not certain

    @functools.cached_property
    def names(self) -> EventNames:
        """The names of its collectives in profiles."""
        collectives = [row.compiled for row in self.report.rows]
        return event_names(self.program.text, collectives, self.program.wrapped)

    def missing(self, names: Iterable[str], backend: Backend) -> list[int]:
        """List the collectives of each run that no executions of these names are."""
        seen = {self.names.collectives.get(name) for name in names}
        return [
            k
            for k in find_regular(self.report.rows)
            if (k, WHOLE) not in seen
            and ((k, START) not in seen or not (backend.runs_kernels or (k, DONE) in seen))
        ]

    def fits(self, names: set[str], recorded: set[str]) -> bool:
        """True if all of `names` are its instructions, and it runs none that is `recorded` beside.

        A profile does not record all instructions (a constant takes no time), so that only those
        say something that it has of some program of this name.
        """
        return names <= self.names.order.keys() and not (self.names.every & recorded) - names


def match_programs(
    candidates: Mapping[str, Candidate], profile: Profile
) -> tuple[dict[str, Executions], list[str]]:
    """Find each program's executions, and notes on what is ambiguous or missing.

    A program is identified by its name and its collectives. If several match, its instructions
    decide, then its number, unless one of that name has an unknown number: a program from JAX's
    persistent cache has executions with the number that it had where it was compiled. If none
    matches, collectives are missing, and its number must fit.
    """
    missing: dict[Program, dict[str, list[int]]] = {}
    executed: dict[Program, set[str]] = {}
    recorded: dict[str, set[str]] = defaultdict(set)
    for program, columns in profile.executions.items():
        executed[program] = {columns.names[k] for k in np.unique(columns.name).tolist()}
        recorded[program[0]] |= executed[program]
    for program, names in executed.items():
        alike = {
            k: c.missing(names, profile.backend)
            for k, c in candidates.items()
            if c.report.name == program[0]
        }
        whole = {k: left for k, left in alike.items() if not left}
        # Several have all their collectives under these names: the other instructions may tell them
        # apart.
        if len(whole) > 1:
            own = [k for k in whole if candidates[k].fits(names, recorded[program[0]])]
            whole = {k: whole[k] for k in own} or whole
        numbers = {k: candidates[k].numbers for k in alike}
        parts = {k: left for k, left in alike.items() if not numbers[k] or program[1] in numbers[k]}
        missing[program] = whole or parts
    # One number that no candidate has is a number of the process that compiled the program. Others
    # of the name may be such numbers, too, and equal a wrong candidate's by chance.
    unsure = {
        module
        for (module, number), keys in missing.items()
        if keys and not any(number in candidates[key].numbers for key in keys)
    }
    found: dict[str, list[Executions]] = defaultdict(list)
    notes: dict[str, None] = {}
    for (module, number), left in missing.items():
        keys = list(left)
        if len(keys) > 1:
            keys = [k for k in keys if number in candidates[k].numbers and module not in unsure]
            if len(keys) != 1:
                advice = (
                    " If JAX loaded them from its persistent cache, set "
                    "JAX_ENABLE_COMPILATION_CACHE=0 for this run."
                )
                notes[
                    f"several programs are called {module}, and the profile does not tell them "
                    "apart: they were not measured." + advice * (module in unsure)
                ] = None
        if len(keys) == 1:
            rows = candidates[keys[0]].report.rows
            found[keys[0]].append(profile.executions[module, number])
            if lost := [rows[k].compiled.name for k in left[keys[0]]]:
                some = ", ".join(lost[:3]) + ", …" * (len(lost) > 3)
                notes[
                    f"{module}: {len(lost)} of its {len(rows)} collectives have no event, or no "
                    f"end, in the profile, and no time here ({some}): {profile.backend.advice}."
                ] = None
    return {key: _join(parts) for key, parts in found.items()}, list(notes)


def _join(parts: Sequence[Executions]) -> Executions:
    if len(parts) == 1:
        return parts[0]
    columns = (np.concatenate(column) for column in zip(*(part[1:] for part in parts), strict=True))
    return Executions(parts[0].names, *columns)
