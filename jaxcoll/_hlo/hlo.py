"""Read compiled programs: every collective of an HLO text, from any of XLA's compilers."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from jaxcoll._hlo.arithmetic import Arithmetic
from jaxcoll._hlo.calls import Call, Item, flatten_calls
from jaxcoll._hlo.chains import Chains, check_chains, find_chains
from jaxcoll._hlo.collective import KINDS, Collective, Loop, Matmul
from jaxcoll._hlo.hlo_text import Computation, Instruction, Module, parse_module, sends
from jaxcoll._hlo.loops import count_turns
from jaxcoll._hlo.replica_groups import count_group, find_groups, read_groups
from jaxcoll._hlo.sources import Source, StackFrames
from jaxcoll._plan.scope_names import names, parse_op_name

_NEAR = 50
"""The most instructions to visit in search of the nearest line of Python."""
_NAMES_COLLECTIVE = re.compile(r"/(psum|all_gather|reduce_scatter|all_to_all|ppermute)[^/]*$")
_INDEX = re.compile(r"\bindex=(\d+)")
_IS_SYNC = re.compile(r'is_sync\\?":\s*true')
_SCATTERS = re.compile(r'"emitter":"\w*AllReduceScatterFusion"')
_SENT_PAIRS = "_xla_send_recv_source_target_pairs="


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
    chains = find_chains(module)
    reader = _Reader(module, chains)
    bodies = {name: reader.body(name, x) for name, x in module.computations.items() if x.sites}
    arithmetic = Arithmetic(module, bodies, chains)
    lengths = {name: module.computations[name].count for name in {*bodies, module.entry}}
    events = flatten_calls(arithmetic.bodies(), module, lengths)
    ends = (event.at if isinstance(event, Matmul) else event.until for event in events)
    return Program(
        name=module.name,
        devices=module.replicas * module.partitions,
        instructions=max([lengths[module.entry], *(end + 1 for end in ends)]),
        collectives=tuple(e for e in events if isinstance(e, Collective)),
        matmuls=tuple(e for e in events if isinstance(e, Matmul)),
        loops=tuple(e for e in events if isinstance(e, Loop)),
        unread=tuple(dict.fromkeys([*reader.unread, *check_chains(chains), *arithmetic.unread])),
        unbounded=tuple(dict.fromkeys(arithmetic.unbounded)),
        notes=tuple(dict.fromkeys(arithmetic.notes)),
    )


class _Reader:
    def __init__(self, module: Module, chains: Chains) -> None:
        self._module, self._chains = module, chains
        self._frames = StackFrames(module.tables)
        self.unread: list[str] = []

    def body(self, name: str, computation: Computation) -> list[Item]:
        """List the collectives and calls of one computation, in order."""
        items: list[Item] = []
        for site in computation.sites:
            if site.opcode in ("dot", "convolution"):
                continue
            try:
                instruction = computation.parse(site)
                sent = sends(site.opcode) and self._is_collective(instruction)
                _, part = self._chains.get(name, {}).get(instruction.name, ("", "Start"))
                if not sent:
                    items += self._calls(computation, instruction, site.at)
                elif part == "Start":
                    items.append(self._collective(name, computation, instruction, site.at))
            except ValueError as error:
                if not sends(site.opcode):
                    raise
                self.unread.append(str(error))
        return items

    def _is_collective(self, instruction: Instruction) -> bool:
        """True if it is one itself; False for an end, and for a start that calls a collective."""
        callees = (self._module.computations.get(name) for _, name in instruction.calls)
        is_call = any(sends(site.opcode) for callee in callees if callee for site in callee.sites)
        return _is_collective(instruction) and not is_call

    def _calls(self, inside: Computation, instruction: Instruction, at: int) -> Iterator[Call]:
        """Yield the calls of an instruction; for an asynchronous pair, those of its start."""
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode.endswith(("-done", "-update")):
            return
        turns = count_turns(self._module, instruction, inside) if opcode == "while" else 1
        for k, (attribute, name) in enumerate(instruction.calls):
            # The condition runs once more than the body.
            is_condition = opcode == "while" and attribute == "condition"
            yield Call(
                instruction.name, name, None if turns is None else turns + is_condition,
                is_async=opcode.endswith("-start"), branch=k if opcode == "conditional" else None,
                is_loop=opcode == "while", is_part=opcode not in ("while", "call", "conditional"),
                scatters=bool(_SCATTERS.search(attributes)), at=at, until=at,
            )  # fmt: skip

    def _collective(
        self, name: str, inside: Computation, instruction: Instruction, at: int
    ) -> Collective:
        kind, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
        operands = inside.operands(instruction)
        if kind in ("ragged-all-to-all", "send"):
            operands = operands[:1]  # the others are the result's buffer, and sizes that stay here
        if kind == "collective-permute" and "slice_sizes=" in instruction.settings:
            raise ValueError(
                f"collective-permute {instruction.name!r} sends slices in place, which jaxcoll "
                "does not count; expected one that sends whole arrays."
            )
        replicas, partitions = self._module.replicas, self._module.partitions
        if kind == "send":  # XLA writes some permutes as pairs of send and recv
            kind = "collective-permute"
            groups = read_groups(attributes.partition(_SENT_PAIRS)[2].lstrip('"'))
        else:
            groups = find_groups(kind, instruction.settings, replicas, partitions)
        source = self._frames.source(attributes)
        near = source if source.user else self._nearest_source(inside, instruction.name)
        return Collective(
            kind, instruction.name, operands, count_group(kind, groups), groups, name,
            is_async=instruction.opcode != kind and not _IS_SYNC.search(attributes),
            op_name=_find_op_name(inside, instruction, len(operands)),
            source=near.user, library=near.library, is_near=near != source, at=at, until=at,
        )  # fmt: skip

    def _nearest_source(self, inside: Computation, name: str) -> Source:
        """Search the instructions that use a result, then those that made its operands."""
        users = inside.users
        for find in (lambda x: users.get(x, ()), lambda x: inside[x].operand_names):
            waiting, seen = deque([name]), {name}
            while waiting and len(seen) < _NEAR:
                for other in itertools.islice(find(waiting.popleft()), _NEAR):
                    other = other.partition("#")[0]
                    if other in inside and other not in seen:
                        if (source := self._frames.source(inside[other].attributes)).user:
                            return source
                        seen.add(other)
                        waiting.append(other)
        return Source()


def _find_op_name(inside: Computation, instruction: Instruction, operands: int) -> str:
    """Find a collective's scope names, in the users of its results if it lacks some."""
    op_name = parse_op_name(instruction.attributes)
    if not op_name:
        return _find_users_names(inside, instruction.name)
    if operands < 2 or len(names(op_name)) > 1:
        return op_name
    # A combined collective keeps the name of one of those that it combines. The elements of its
    # result have the names of all.
    parts: dict[int, str] = {}
    for user in _skip_ends(inside, instruction.name):
        if user.opcode == "get-tuple-element" and (index := _INDEX.search(user.attributes)):
            parts[int(index[1])] = parse_op_name(user.attributes)
    found = [parts.get(k, "") for k in range(operands)]
    return f"({':'.join(found)})" if all(found) and len(set(found)) > 1 else op_name


def _skip_ends(inside: Computation, name: str) -> Iterator[Instruction]:
    """Yield the users of a result, and those of its end in the place of the end."""
    for user in map(inside.__getitem__, inside.users.get(name, ())):
        if user.opcode.endswith(("-done", "-update")):
            yield from _skip_ends(inside, user.name)
        else:
            yield user


def _find_users_names(inside: Computation, name: str) -> str:
    """Find the names of collectives that the users of a nameless one bear.

    A compiler for GPUs (JAX 0.10) concatenates operands, and merges the collectives without a
    name. Each slice of the result, or the view of a slice that has the shape of the operand, has
    the name of the collective that it stands for.
    """
    ends, parts = [name], {}
    for _ in range(2):  # a slice, a view of it
        # The users of a collective and of a tuple may use other operands.
        users = {
            x.name: parse_op_name(x.attributes)
            for end in ends
            for x in _skip_ends(inside, end)
            if x.opcode != "tuple" and not sends(x.opcode)
        }
        parts |= dict.fromkeys(filter(_NAMES_COLLECTIVE.search, users.values()))
        ends = [x for x, op_name in users.items() if not op_name]
    return f"({':'.join(parts)})" if len(parts) > 1 else "".join(parts)


def _is_collective(instruction: Instruction) -> bool:
    """True for a collective or its start; ValueError for an unknown kind of communication."""
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode.removesuffix("-start") in KINDS:
        return True
    if opcode == "send-done" or opcode.removesuffix("-done").removesuffix("-update") in KINDS:
        return False
    if opcode == "send" and _SENT_PAIRS in attributes:
        return True
    if opcode == "send" and "is_host_transfer=true" in attributes and "megascale" not in attributes:
        return False  # to the device's own host, as callbacks do
    raise ValueError(
        f"`{opcode}` ({instruction.name!r}) moves data between devices, which is not counted; "
        f"known are {', '.join(KINDS)}, and their asynchronous forms."
    )
