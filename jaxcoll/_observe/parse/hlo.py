"""Read compiled programs: every collective of an HLO text, from any of XLA's compilers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcoll._observe.parse.arithmetic import Arithmetic
from jaxcoll._observe.parse.calls import Call, Item, flattened
from jaxcoll._observe.parse.collective import KINDS, Collective, Loop, Matmul
from jaxcoll._observe.parse.hlo_text import (
    Computation,
    Instruction,
    Module,
    Source,
    StackFrames,
    pair_ends,
    parse_instruction,
    parse_module,
)
from jaxcoll._observe.parse.replica_groups import group_size, groups_of
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
_ELEMENT = re.compile(r" get-tuple-element\((?:.* )?%?([\w.\-]+)\), index=(\d+)")
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_NAMES = re.compile(r"%([\w.\-]+)")
_NEAR = 50
"""The most instructions to visit in search of the nearest line of Python."""
_JOINS = re.compile(rf"{_COMMUNICATES.pattern}| tuple\(")  # its users may use other operands
_NAMES_COLLECTIVE = re.compile(r"/(psum|all_gather|reduce_scatter|all_to_all|ppermute)[^/]*$")
_NUMBER = re.compile(r"-?\d+")
_INDEX = re.compile(r"\bindex=(\d+)")
_IS_SYNC = re.compile(r'is_sync\\?":\s*true')


class Program(NamedTuple):
    """A compiled program; the fields are those of `Report`."""

    name: str
    devices: int
    instructions: int
    collectives: tuple[Collective, ...]
    matmuls: tuple[Matmul, ...]
    loops: tuple[Loop, ...]
    unread: tuple[str, ...]
    unbounded: tuple[str, ...]
    notes: tuple[str, ...]


def read_hlo(text: str, devices: int = 1) -> Program:
    """Read the text of `compiled.as_text()`, or HLO that was lowered for `devices` devices.

    Nothing is skipped silently: it lists every operand of a combined collective, with the element
    type that the compiler chose; follows loops, calls, fusions and conditionals from the entry; and
    names unknown instructions in `unread`. The order is that of the compiler's schedule.

    Raises:
      ValueError: the text is not HLO or is truncated, or a computation calls itself.
    """
    module = parse_module(text, devices)
    reader = _Reader(module)
    arithmetic = Arithmetic(module, {name: reader.body(name) for name in module.computations})
    lengths = {name: len(lines) for name, lines in module.computations.items()}
    events = flattened(arithmetic.bodies(), module.entry, lengths)
    ends = (event.at if isinstance(event, Matmul) else event.until for event in events)
    return Program(
        name=module.name,
        devices=module.replicas * module.partitions,
        instructions=max([lengths[module.entry], *(end + 1 for end in ends)]),
        collectives=tuple(e for e in events if isinstance(e, Collective)),
        matmuls=tuple(e for e in events if isinstance(e, Matmul)),
        loops=tuple(e for e in events if isinstance(e, Loop)),
        unread=tuple(dict.fromkeys([*reader.unread, *arithmetic.unread])),
        unbounded=tuple(dict.fromkeys(arithmetic.unbounded)),
        notes=tuple(dict.fromkeys(arithmetic.notes)),
    )


class _Reader:
    """Reads each computation's lines once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._frames = StackFrames(module.tables)
        # Cache one computation at a time: a large program's would need as much memory as its text.
        self._opened = functools.lru_cache(1)(lambda x: Computation(module.computations[x]))
        self._ties = functools.lru_cache(1)(lambda x: _ties(module.computations[x]))
        self._elements = functools.lru_cache(1)(lambda x: _elements(module.computations[x]))
        self.unread: list[str] = []

    def body(self, computation: str) -> list[Item]:
        """Return the collectives and calls of one computation, in order."""
        items: list[Item] = []
        for at, line in enumerate(self._module.computations[computation]):
            if fusion := _FUSION.match(line):  # most lines of a large program
                site, callee = fusion.groups()
                items.append(Call(site, callee, is_part=True, at=at, until=at))
                continue
            if _COMMUNICATES.search(line):
                try:
                    instruction = parse_instruction(line)
                    if _is_collective(instruction):
                        items.append(self._collective(computation, instruction, at))
                except ValueError as error:
                    self.unread.append(str(error))
            if _MAY_CALL.search(line):
                items += self._calls(computation, parse_instruction(line), at)
        return items

    def _calls(self, computation: str, instruction: Instruction, at: int) -> Iterator[Call]:
        """Yield the calls of an instruction; for an asynchronous pair, those of its start."""
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode.endswith(("-done", "-update")):
            return
        turns = self._turns(computation, instruction) if opcode == "while" else 1
        for attribute, called in _CALLS.findall(attributes.partition(", metadata=")[0]):
            for k, name in enumerate(n.strip().lstrip("%") for n in called.strip("{}").split(",")):
                # The condition runs once more than the body.
                is_condition = opcode == "while" and attribute == "condition"
                branch = _BRANCHES.get(attribute)
                if name:
                    yield Call(
                        site=instruction.name,
                        callee=name,
                        trips=None if turns is None else turns + is_condition,
                        is_async=opcode.endswith("-start"),
                        branch=None if branch is None else branch + k,
                        is_loop=opcode == "while",
                        is_part=opcode not in ("while", "call", "conditional"),
                        at=at,
                        until=at,
                    )

    def _turns(self, computation: str, loop: Instruction) -> int | None:
        if count := _TRIPS.search(loop.attributes):
            return int(count[1])
        try:
            return _counted_turns(self._module, loop, self._opened(computation))
        except (LookupError, ValueError):
            return None  # a part of the loop is missing, or has an unknown form

    def _collective(self, computation: str, instruction: Instruction, at: int) -> Collective:
        kind, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
        operands = self._opened(computation).operands(instruction)
        if kind == "ragged-all-to-all":
            operands = operands[:1]  # the others are the result's buffer, and sizes that stay here
        if kind == "collective-permute" and "slice_sizes=" in attributes:
            raise ValueError(
                f"collective-permute {instruction.name!r} sends slices in place, which jaxcoll "
                "does not count; expected one that sends whole arrays."
            )
        groups = groups_of(kind, attributes, self._module.replicas, self._module.partitions)
        source = self._frames.source(attributes)
        near = source if source.user else self._nearest_source(computation, instruction.name)
        return Collective(
            kind=kind,
            name=instruction.name,
            operands=operands,
            group_size=group_size(kind, groups),
            groups=groups,
            computation=computation,
            is_async=instruction.opcode != kind and not _IS_SYNC.search(attributes),
            op_name=self._op_name(computation, instruction, len(operands)),
            source=near.user,
            library=near.library,
            is_near=near != source,
            at=at,
            until=at,
        )

    def _nearest_source(self, computation: str, name: str) -> Source:
        """Return the lines of the nearest instruction that uses a result, or made its operands."""
        lines = self._opened(computation).lines
        for neighbours in self._ties(computation):
            waiting, seen = [name], {name}
            while waiting and len(seen) < _NEAR:
                for other in neighbours.get(waiting.pop(0), ()):
                    if other in lines and other not in seen:
                        if (source := self._frames.source(lines[other])).user:
                            return source
                        seen.add(other)
                        waiting.append(other)
        return Source()

    def _op_name(self, computation: str, instruction: Instruction, operands: int) -> str:
        """Return its scope names, from the users of its results if it lacks some."""
        op_name = op_name_of(instruction.attributes)
        if not op_name:
            return self._users_names(computation, instruction.name)
        if operands < 2 or len(names(op_name)) > 1:
            return op_name
        elements = self._elements(computation).get(instruction.name, {})
        parts = [elements.get(k, "") for k in range(operands)]
        return f"({':'.join(parts)})" if all(parts) and len(set(parts)) > 1 else op_name

    def _users_names(self, computation: str, name: str) -> str:
        """Return the names of collectives that the users of a nameless one bear.

        A compiler for GPUs (JAX 0.10) concatenates operands, and merges the collectives without a
        name. Each slice of the result, or the view of a slice that has the shape of the operand,
        has the name of the collective that it stands for.
        """
        lines, (users, _) = self._opened(computation).lines, self._ties(computation)
        ends, parts = [name], {}
        for _ in range(3):  # the end of an asynchronous collective, a slice, a view of it
            of_users = {
                x: op_name_of(line)
                for end in ends
                for x in users.get(end, ())
                if "-done(" in (line := lines.get(x, "")) or not _JOINS.search(line)
            }
            parts |= dict.fromkeys(filter(_NAMES_COLLECTIVE.search, of_users.values()))
            ends = [x for x, op_name in of_users.items() if not op_name]
        return f"({':'.join(parts)})" if len(parts) > 1 else "".join(parts)


def _ties(lines: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Map each instruction to the users of its result, and to the makers of its operands."""
    users: dict[str, list[str]] = {}
    makers: dict[str, list[str]] = {}
    for line in lines:
        name, *operands = _NAMES.findall(line.partition(", metadata=")[0]) or [""]
        makers[name] = operands
        for operand in operands:
            users.setdefault(operand, []).append(name)
    return users, makers


def _elements(lines: Sequence[str]) -> dict[str, dict[int, str]]:
    """Map each tuple's name and index to the scopes of the instruction that uses that element."""
    starts = {name: start for _, name, _, start in pair_ends(lines)}
    elements: dict[str, dict[int, str]] = {}
    for element in filter(None, map(_ELEMENT.search, lines)):
        whole = starts.get(element[1], element[1])
        elements.setdefault(whole, {})[int(element[2])] = op_name_of(element.string)
    return elements


def _is_collective(instruction: Instruction) -> bool:
    """True for a collective or its start; ValueError for an unknown kind of communication."""
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
        f"`{opcode}` ({instruction.name!r}) moves data between devices, which is not counted; "
        f"known are {', '.join(KINDS)}, and their asynchronous forms."
    )


def _counted_turns(module: Module, loop: Instruction, caller: Computation) -> int | None:
    """Count iterations of a `while` without a trip count; LookupError if a part of it is missing.

    The count is known if a counter begins at a constant, grows by one in each iteration, and the
    loop continues while it is less than another constant; otherwise None.
    """
    parts = dict(_LOOP.findall(loop.attributes))
    condition, body = (Computation(module.computations[parts[k]]) for k in ("condition", "body"))
    test, state = condition.root, body.root
    start = _through_copies(loop.operand_names[0], caller)
    if (test.opcode, state.opcode, start.opcode) != ("compare", "tuple", "tuple"):
        return None
    counter, limit = (_through_copies(name, condition) for name in test.operand_names)
    k, last = _element(counter, condition), _constant(limit)
    if k is None or last is None or "direction=LT" not in test.attributes:
        return None
    step = _through_copies(state.operand_names[k], body)
    first = _constant(_through_copies(start.operand_names[k], caller))
    if step.opcode != "add" or first is None:
        return None
    added = [_through_copies(name, body) for name in step.operand_names]
    if {_element(x, body) for x in added} != {k, None} or 1 not in map(_constant, added):
        return None
    return max(last - first, 0)


def _through_copies(name: str, inside: Computation) -> Instruction:
    """Return the instruction that makes a value, skipping copies."""
    instruction = inside[name]
    while instruction.opcode == "copy":
        instruction = inside[instruction.operand_names[0]]
    return instruction


def _element(x: Instruction, inside: Computation) -> int | None:
    """Return the index if `x` is an element of its computation's parameter; otherwise None."""
    if x.opcode != "get-tuple-element":
        return None
    whole, index = _through_copies(x.operand_names[0], inside), _INDEX.search(x.attributes)
    return int(index[1]) if whole.opcode == "parameter" and index else None


def _constant(x: Instruction) -> int | None:
    return int(x.operands) if x.opcode == "constant" and _NUMBER.fullmatch(x.operands) else None
