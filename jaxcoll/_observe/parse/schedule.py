"""Reads the arithmetic of a compiled program, and what of it runs beside which collective."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxcoll._observe.parse.calls import Bodies, Call, Matmul, busy_among
from jaxcoll._observe.parse.collective import Collective, Kernels, Meanwhile
from jaxcoll._observe.parse.hlo_text import (
    Computation,
    Module,
    defined_name,
    pair_ends,
    parse_instruction,
)
from jaxcoll._observe.parse.kernels import KernelReader
from jaxcoll._observe.parse.matmul import TARGET, flops, is_matmul

_IDLE = re.compile(
    r" (?:parameter|constant|get-tuple-element|tuple|bitcast|after-all|iota|partition-id|"
    r"[a-z][\w\-]*-(?:start|update|done))\("
)
_MAY_SEND = re.compile(
    r"nccl|nvshmem|\bmpi|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|collective|"
    r"has_communication\\?\":\s*true",
    re.IGNORECASE,
)


class Work(NamedTuple):
    """Matrix products, their floating-point operations, and the type that most of them are of."""

    matmuls: int = 0
    flops: int = 0
    dtype: str = ""

    def plus(self, other: Work, times: int = 1) -> Work:
        """Both together."""
        more = times * other.flops
        dtype = self.dtype if self.dtype and self.flops >= more else other.dtype
        return Work(self.matmuls + times * other.matmuls, self.flops + more, dtype)


class Schedule:
    """A module whose collectives and calls are known already.

    Appends to `uncounted` what may send and cannot be counted, to `notes` such arithmetic.
    """

    def __init__(
        self, module: Module, bodies: Bodies, uncounted: list[str], notes: list[str]
    ) -> None:
        self._module, self._bodies = module, bodies
        self._uncounted, self._notes = uncounted, notes
        self._busy = busy_among(bodies, (Collective,))
        self._kernels = KernelReader(module)
        self._direct: dict[str, dict[int, Work]] = {}
        self._totals: dict[str, Work] = {}
        # The calls of each computation that are programs of their own, by their line.
        self._programs: dict[str, dict[int, list[Call]]] = {name: {} for name in bodies}
        for name, body in bodies.items():
            for item in body:
                if isinstance(item, Call) and not self._is_dropped(item):
                    self._programs[name].setdefault(item.at, []).append(item)

    def bodies(self) -> Bodies:
        """The bodies with matrix products in their places, and with what runs meanwhile.

        What spells out a single instruction and sends nothing is dropped.
        """
        return {name: self._body(name) for name in self._bodies}

    def _body(self, name: str) -> list[Collective | Call | Matmul]:
        lines, ends = self._module.computations[name], self._ends(name)
        items: list[Collective | Call | Matmul] = [
            Matmul(defined_name(lines[at]), work.flops, at=at, dtype=work.dtype)
            for at, work in self._direct_work(name).items()
        ]
        for item in self._bodies[name]:
            if isinstance(item, Matmul) or (isinstance(item, Call) and self._is_dropped(item)):
                continue
            if isinstance(item, Collective) or item.callee in self._busy:
                item = self._placed(name, item, ends)
            items.append(item)
        return sorted(items, key=lambda item: item.at)

    def _placed(
        self, computation: str, item: Collective | Call, ends: Mapping[str, tuple[int, int]]
    ) -> Collective | Call:
        """A collective, or a call of what sends, with what is around it and runs meanwhile."""
        name = item.site if isinstance(item, Call) else item.name
        if isinstance(item, Call) and item.is_loop and item.trips is None:
            self._uncounted.append(
                f"loop {name!r} does not say how often it turns: what it sends is counted "
                "for one turn."
            )
        if isinstance(item, Collective) or item.is_async:
            item = dataclasses.replace(item, kernels=self._kernels_around(computation, name))
        if not item.is_async:
            return item
        at, until = ends.get(name, (item.at, item.at))
        meanwhile = self._meanwhile(computation, at, until)
        return dataclasses.replace(item, at=at, until=until, meanwhile=meanwhile)

    def _kernels_around(self, computation: str, name: str) -> Kernels | None:
        try:
            return self._kernels.around(computation, name)
        except (ValueError, KeyError, IndexError) as error:
            self._notes.append(f"the kernels around {name!r} could not be read: {error}")
            return None

    def _is_dropped(self, call: Call) -> bool:
        return call.is_part and call.callee not in self._busy

    def _meanwhile(self, name: str, start: int, end: int) -> Meanwhile:
        """What stands between two lines of a computation."""
        direct, programs, between = self._direct_work(name), self._programs[name], []
        work = Work()
        for at in range(start + 1, end):
            work = work.plus(direct.get(at, Work()))
            between += programs.get(at, ())
        work = work.plus(self._called(between))
        # Constants, tuples and the ends of other pairs take no time.
        lines = self._module.computations[name][start + 1 : end]
        count = sum(not _IDLE.search(line) for line in lines)
        return Meanwhile(count, work.matmuls, work.flops)

    def _called(self, calls: Iterable[Call]) -> Work:
        """The work of computations that are called; of a conditional, that of its longest."""
        work = Work()
        branches: dict[str, Work] = {}
        for call in calls:
            turns = 1 if call.trips is None else call.trips
            each = Work().plus(self._total(call.callee), turns)
            if call.branch is None:
                work = work.plus(each)
            else:
                branches[call.site] = max(branches.get(call.site, Work()), each)
        for most in branches.values():
            work = work.plus(most)
        return work

    def _total(self, name: str) -> Work:
        """The work of one computation, with what it calls."""
        if name not in self._totals:
            self._totals[name] = Work()  # for one that calls itself, which is found elsewhere
            work = self._called(itertools.chain(*self._programs[name].values()))
            for direct in self._direct_work(name).values():
                work = work.plus(direct)
            self._totals[name] = work
        return self._totals[name]

    def _direct_work(self, name: str) -> dict[int, Work]:
        """The work of each instruction, by its line; a fusion's is that of what it fuses."""
        if name not in self._direct:
            # Stays empty while it is worked out, for a text in which a computation calls itself.
            self._direct[name] = {}
            found = self._own_work(name)
            for item in self._bodies[name]:
                if isinstance(item, Call) and self._is_dropped(item):
                    work = self._total(item.callee)
                    if work.matmuls:
                        found[item.at] = found.get(item.at, Work()).plus(work)
            self._direct[name] = found
        return self._direct[name]

    def _own_work(self, name: str) -> dict[int, Work]:
        found: dict[int, Work] = {}
        lines, inside = self._module.computations[name], None
        for at, line in enumerate(lines):
            if not is_matmul(line):
                continue
            if " custom-call(" in line and (target := TARGET.search(line)):
                # A backend_config may be long: it is searched only where it has that field.
                config = line.partition("backend_config=")[2] if "has_comm" in line else ""
                if _MAY_SEND.search(target[1]) or _MAY_SEND.search(config):
                    self._uncounted.append(
                        f"custom call {defined_name(line)!r} ({target[1]}) may send by itself, "
                        "which is not counted."
                    )
            inside, instruction = inside or Computation(lines), parse_instruction(line)
            operations = flops(instruction, inside)
            if operations is None:
                self._notes.append(
                    f"{defined_name(line)!r} multiplies matrices of sizes that its text does not "
                    "say: its floating-point operations are not counted."
                )
            if operations != 0:
                operands = inside.operands(instruction)
                found[at] = Work(1, operations or 0, operands[0].dtype if operands else "")
        return found

    def _ends(self, name: str) -> dict[str, tuple[int, int]]:
        """Where what each asynchronous start begins travels, and where it ends, by its name.

        A start that is given nothing yet only prepares; what it sends comes with its update.
        """
        if not any(i.is_async for i in self._bodies[name] if not isinstance(i, Matmul)):
            return {}
        lines = self._module.computations[name]
        places = {defined_name(line): at for at, line in enumerate(lines) if "-start(" in line}
        found: dict[str, tuple[int, int]] = {}
        for at, _, opcode, start in pair_ends(lines):
            begins, _ = found.get(start, (places.get(start, at), at))
            if opcode.endswith("-update") and "-start()" in lines[begins]:
                begins = at
            found[start] = (begins, at)
        return found
