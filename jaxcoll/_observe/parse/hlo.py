"""Reads compiled programs: every collective of an HLO text, whichever compiler printed it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxcoll._observe.parse import hlo_text
from jaxcoll._observe.parse.calls import Call, Loop, Matmul, carried_out
from jaxcoll._observe.parse.collective import KINDS, Collective, Groups
from jaxcoll._observe.parse.hlo_text import Computation, Instruction, Module, parse_instruction
from jaxcoll._observe.parse.replica_groups import device_groups, group_size, read_groups
from jaxcoll._observe.parse.schedule import Schedule
from jaxcoll._observe.parse.source import StackFrames
from jaxcoll._plan.scope_names import names, op_name_of

_COMMUNICATES = re.compile(r" ((?:all-|collective-|reduce-scatter|ragged-all)[\w\-]*|send)\(")
_FUSION = re.compile(
    r"\s+(?:ROOT )?%?([\w.\-]+) = \S+ fusion\([^()]*\), kind=\w+, calls=%?([\w.\-]+)"
)
_CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_MAY_CALL = re.compile(r"(?:body|condition|calls|to_apply|computations?)=")
_BRANCHES = {"branch_computations": 0, "true_computation": 0, "false_computation": 1}
_TRIPS = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\s*\\?"(\d+)')
_GROUPS = re.compile(r"\breplica_groups=")
_PAIRS = re.compile(r"\bsource_target_pairs=")
_ELEMENT = re.compile(r" get-tuple-element\((?:.* )?%?([\w.\-]+)\), index=(\d+)")
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_NUMBER = re.compile(r"-?\d+")
_INDEX = re.compile(r"\bindex=(\d+)")
_IS_SYNC = re.compile(r'is_sync\\?":\s*true')


def read_hlo(text: str) -> tuple[Collective, ...]:
    """The collectives of what `compiled.as_text()` returns, in the order of the text.

    Law: nothing is skipped in silence. An asynchronous pair counts once; every operand of a
    combined collective is listed, in the element type that the compiler settled on; loops,
    calls, fusions and conditionals are followed from the entry; what is not understood is an
    error. The order is the schedule where the compiler has made one.
    """
    return read_program(text, strict=True).collectives


class Program(NamedTuple):
    """A compiled program, as far as its text tells; `Report` says what each field is."""

    name: str
    devices: int
    instructions: int
    collectives: tuple[Collective, ...]
    matmuls: tuple[Matmul, ...] = ()
    loops: tuple[Loop, ...] = ()
    uncounted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_program(text: str, *, strict: bool = False) -> Program:
    """A compiled program: its collectives, and the arithmetic that is scheduled around them.

    Law: as `read_hlo`; but what is not understood is listed in `uncounted`. If `strict`, it is an
    error, and the arithmetic is left out.
    """
    module = hlo_text.parse_module(text)
    uncounted: list[str] = []
    notes: list[str] = []
    reader = _Reader(module, None if strict else uncounted)
    bodies = {name: reader.body(name) for name in module.computations}
    if not strict:
        bodies = Schedule(module, bodies, uncounted, notes).bodies()
    lengths = {name: len(lines) for name, lines in module.computations.items()}
    events = carried_out(bodies, module.entry, lengths)
    ends = (event.at if isinstance(event, Matmul) else event.until for event in events)
    return Program(
        name=module.name,
        devices=module.replicas * module.partitions,
        instructions=max([lengths[module.entry], *(end + 1 for end in ends)]),
        collectives=tuple(e for e in events if isinstance(e, Collective)),
        matmuls=tuple(e for e in events if isinstance(e, Matmul)),
        loops=tuple(e for e in events if isinstance(e, Loop)),
        uncounted=tuple(dict.fromkeys(uncounted)),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Reader:
    """Goes through each computation's lines once."""

    def __init__(self, module: Module, uncounted: list[str] | None) -> None:
        self._module = module
        self._uncounted = uncounted
        self._frames = StackFrames(module.tables)
        # One computation's at a time: a large program's would take as much as its text.
        self._opened = functools.lru_cache(1)(lambda x: Computation(module.computations[x]))
        self._elements = functools.lru_cache(1)(lambda x: _elements(module.computations[x]))

    def body(self, computation: str) -> list[Collective | Call | Matmul]:
        """The collectives of one computation, and what it calls, in order."""
        lines = self._module.computations[computation]
        found: list[Collective | Call | Matmul] = []
        for at, line in enumerate(lines):
            if fusion := _FUSION.match(line):  # most lines of a large program
                site, callee = fusion.groups()
                found.append(Call(site, callee, is_part=True, at=at, until=at))
                continue
            if _COMMUNICATES.search(line):
                try:
                    instruction = parse_instruction(line)
                    if _is_collective(instruction):
                        found.append(self._collective(computation, instruction, at))
                except ValueError as error:
                    if self._uncounted is None:
                        raise
                    self._uncounted.append(str(error))
            if _MAY_CALL.search(line):
                found += _calls(line, at, lambda loop: self._turns(computation, loop))
        return found

    def _turns(self, computation: str, loop: Instruction) -> int | None:
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        try:
            return _turns(self._module, loop, self._opened(computation))
        except (LookupError, ValueError):
            return None  # something of the loop is missing, or of a form that is not known here

    def _collective(self, computation: str, instruction: Instruction, at: int) -> Collective:
        kind, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
        operands = self._opened(computation).operands(instruction)
        if kind == "ragged-all-to-all":
            operands = operands[:1]  # the others are the result's memory, and sizes that stay here
        if kind == "collective-permute" and "slice_sizes=" in attributes:
            raise ValueError(
                f"collective-permute {instruction.name!r} sends slices in place, which is not "
                "counted here; expected one that sends whole arrays."
            )
        groups = _groups(self._module, kind, attributes)
        return Collective(
            kind=kind,
            name=instruction.name,
            operands=operands,
            group_size=group_size(kind, groups),
            groups=groups,
            computation=computation,
            is_async=instruction.opcode != kind and not _IS_SYNC.search(attributes),
            op_name=self._op_name(computation, instruction, len(operands)),
            source=self._frames.source(attributes),
            at=at,
            until=at,
        )

    def _op_name(self, computation: str, instruction: Instruction, operands: int) -> str:
        """Its own, or, where that names the first of several only, those of its results."""
        own = op_name_of(instruction.attributes)
        if operands < 2 or len(names(own)) > 1:
            return own
        elements = self._elements(computation).get(instruction.name, {})
        several = [elements.get(k, "") for k in range(operands)]
        return f"({':'.join(several)})" if all(several) and len(set(several)) > 1 else own


def _elements(lines: Sequence[str]) -> dict[str, dict[int, str]]:
    """Scopes of the instructions that take a tuple apart, by the tuple's name and index."""
    starts = {name: start for _, name, _, start in hlo_text.pair_ends(lines)}
    found: dict[str, dict[int, str]] = {}
    for element in filter(None, map(_ELEMENT.search, lines)):
        whole = starts.get(element[1], element[1])
        found.setdefault(whole, {})[int(element[2])] = op_name_of(element.string)
    return found


def _is_collective(instruction: Instruction) -> bool:
    """Whether it is a collective, or the start of one; the rest of a pair says nothing new."""
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode.removesuffix("-start") in KINDS:
        return True
    if opcode.removesuffix("-done").removesuffix("-update") in KINDS:
        return False
    if not _COMMUNICATES.match(f" {opcode}("):
        return False
    if opcode == "send" and "is_host_transfer=true" in attributes and "megascale" not in attributes:
        return False  # to the device's own host, as callbacks do
    raise ValueError(
        f"`{opcode}` ({instruction.name!r}) moves data between devices in a way that is not "
        f"counted here; known are {', '.join(KINDS)}, and their asynchronous forms."
    )


def _groups(module: Module, kind: str, attributes: str) -> Groups:
    found = (_PAIRS if kind == "collective-permute" else _GROUPS).search(attributes)
    return device_groups(
        read_groups(attributes[found.end() :]) if found else (),
        kind,
        has_channel="channel_id=" in attributes,
        has_global_ids="use_global_device_ids=true" in attributes,
        replicas=module.replicas,
        partitions=module.partitions,
    )


def _calls(line: str, at: int, turns_of: Callable[[Instruction], int | None]) -> Iterator[Call]:
    """What an instruction calls; the rest of an asynchronous pair only repeats its start."""
    instruction = parse_instruction(line)
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode.endswith(("-done", "-update")):
        return
    known = turns_of(instruction) if opcode == "while" else None
    for attribute, called in _CALLS.findall(attributes.partition(", metadata=")[0]):
        for k, name in enumerate(n.strip().lstrip("%") for n in called.strip("{}").split(",")):
            trips: int | None = 1
            if opcode == "while":
                # The condition is asked once more than the body is carried out.
                trips = None if known is None else known + (attribute == "condition")
            branch = _BRANCHES.get(attribute)
            if name:
                yield Call(
                    site=instruction.name,
                    callee=name,
                    trips=trips,
                    is_async=opcode.endswith("-start"),
                    branch=None if branch is None else branch + k,
                    is_loop=opcode == "while",
                    is_part=opcode not in ("while", "call", "conditional"),
                    at=at,
                    until=at,
                )


def _turns(module: Module, loop: Instruction, caller: Computation) -> int | None:
    """How often a `while` turns whose count the compiler dropped; LookupError where that is lost.

    Law: a number only if a counter begins at a constant, grows by one in each turn, and the loop
    goes on while it is less than another constant; otherwise None.
    """
    parts = dict(_LOOP.findall(loop.attributes))
    tested, body = (Computation(module.computations[parts[k]]) for k in ("condition", "body"))
    test, state = tested.root, body.root
    start = _made(loop.given[0], caller)
    if (test.opcode, state.opcode, start.opcode) != ("compare", "tuple", "tuple"):
        return None
    counter, limit = (_made(name, tested) for name in test.given)
    k, last = _element(counter, tested), _constant(limit)
    if k is None or last is None or "direction=LT" not in test.attributes:
        return None
    step = _made(state.given[k], body)
    first = _constant(_made(start.given[k], caller))
    if step.opcode != "add" or first is None:
        return None
    added = [_made(name, body) for name in step.given]
    if {_element(x, body) for x in added} != {k, None} or 1 not in map(_constant, added):
        return None
    return max(last - first, 0)


def _made(name: str, inside: Computation) -> Instruction:
    """What makes a value, seen through copies of it."""
    found = inside[name]
    while found.opcode == "copy":
        found = inside[found.given[0]]
    return found


def _element(x: Instruction, inside: Computation) -> int | None:
    """Which element of its computation's only parameter it is."""
    if x.opcode != "get-tuple-element":
        return None
    of, index = _made(x.given[0], inside), _INDEX.search(x.attributes)
    return int(index[1]) if of.opcode == "parameter" and index else None


def _constant(x: Instruction) -> int | None:
    return int(x.operands) if x.opcode == "constant" and _NUMBER.fullmatch(x.operands) else None
