"""Reads compiled programs: every collective of an HLO text, whichever compiler printed it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jaxcoll._observe.calls import Call, carried_out
from jaxcoll._observe.collective import KINDS, Collective, Groups
from jaxcoll._observe.hlo_text import (
    Instruction,
    Module,
    definitions,
    operands_of,
    parse_instruction,
    parse_module,
)
from jaxcoll._observe.replica_groups import device_groups, group_size, read_groups

_COMMUNICATES = re.compile(r" ((?:all-|collective-|reduce-scatter|ragged-all)[\w\-]*|send)\(")
_CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_MAY_CALL = re.compile(r"(?:body|condition|calls|to_apply|computations?)=")
_BRANCHES = {"branch_computations": 0, "true_computation": 0, "false_computation": 1}
_TRIPS = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\s*\\?"(\d+)')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_GROUPS = re.compile(r"\breplica_groups=")
_PAIRS = re.compile(r"\bsource_target_pairs=")
_IS_SYNC = re.compile(r'is_sync\\?":\s*true')


def read_hlo(text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program.

    Law: nothing is skipped in silence. An asynchronous pair counts once; every operand of a
    combined collective is listed, in the element type that the compiler settled on; loops,
    calls, fusions and conditionals are followed from the entry; what is not understood is an
    error.

    Args:
      text: what `compiled.as_text()` returns, of any backend.

    Returns:
      The collectives in the order of the text, which is the schedule where the compiler has
      made one. Cost: about a second for 100 MB.

    Raises:
      ValueError: the text is no HLO, is cut off, or uses a notation that is not known here.

    Examples:
      >>> program = '''HloModule jit_f, replica_count=4
      ... ENTRY %main (x: f32[100]) -> f32[100] {
      ...   %x = f32[100]{0} parameter(0)
      ...   ROOT %sum = f32[100]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}
      ... }'''
      >>> collective, = read_hlo(program)
      >>> collective.kind, collective.operands[0].dtype, collective.group_size
      ('all-reduce', 'f32', 2)
    """
    module = parse_module(text)
    bodies = {name: list(_body(module, name, lines)) for name, lines in module.computations.items()}
    return carried_out(bodies, module.entry)


def _body(module: Module, computation: str, lines: list[str]) -> Iterator[Collective | Call]:
    """The collectives of one computation, and what it calls, in order."""
    defined: Mapping[str, str] | None = None
    for line in lines:
        if _COMMUNICATES.search(line):
            instruction = parse_instruction(line)
            if _is_collective(instruction):
                defined = defined or definitions(lines)
                yield _collective(module, computation, instruction, defined)
        if _MAY_CALL.search(line):
            yield from _calls(line)


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


def _collective(
    module: Module, computation: str, instruction: Instruction, defined: Mapping[str, str]
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    operands = operands_of(instruction, defined)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # the others are the result's memory, and sizes that stay here
    if kind == "collective-permute" and "slice_sizes=" in instruction.attributes:
        raise ValueError(
            f"collective-permute {instruction.name!r} sends slices in place, which is not counted "
            "here; expected one that sends whole arrays."
        )
    groups = _groups(module, kind, instruction.attributes)
    op_name = _OP_NAME.search(instruction.attributes)
    return Collective(
        kind=kind,
        name=instruction.name,
        operands=operands,
        group_size=group_size(kind, groups),
        groups=groups,
        computation=computation,
        is_async=instruction.opcode != kind and not _IS_SYNC.search(instruction.attributes),
        op_name=op_name[1] if op_name else "",
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


def _calls(line: str) -> Iterator[Call]:
    """What an instruction calls; the rest of an asynchronous pair only repeats its start."""
    instruction = parse_instruction(line)
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode.endswith(("-done", "-update")):
        return
    known = _TRIPS.search(attributes) if opcode == "while" else None
    for attribute, names in _CALLS.findall(attributes.partition(", metadata=")[0]):
        for k, name in enumerate(n.strip().lstrip("%") for n in names.strip("{}").split(",")):
            trips: int | None = 1
            if opcode == "while":
                # The condition is asked once more than the body is carried out.
                trips = int(known[1]) + (attribute == "condition") if known else None
            branch = _BRANCHES.get(attribute)
            if name:
                yield Call(
                    site=instruction.name,
                    callee=name,
                    trips=trips,
                    is_async=opcode.endswith("-start"),
                    branch=None if branch is None else branch + k,
                )
