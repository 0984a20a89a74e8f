"""Count the iterations of loops whose text says where a counter begins, how it grows and ends."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxcoll._hlo.hlo_text import Computation, Instruction, Module

_TRIPS = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\s*\\?"(\d+)')
_PARTS = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=([A-Z]+)")
_INTEGER = re.compile(r"([su])(\d+)\[\]")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_COPIES = ("copy", "copy-start", "copy-done")


class _Element(NamedTuple):
    """An element of the tuple that is a computation's parameter."""

    number: int


def count_turns(module: Module, loop: Instruction, caller: Computation) -> int | None:
    """Count the iterations of a `while`; None if its text does not prove them."""
    if count := _TRIPS.search(loop.attributes):
        return int(count[1])
    try:
        return _prove_turns(module, loop, caller)
    except (LookupError, ValueError):
        return None  # a part of the loop is missing, or has an unknown form


def _prove_turns(module: Module, loop: Instruction, caller: Computation) -> int | None:
    parts = dict(_PARTS.findall(loop.settings))
    condition, body = (module.computations[parts[k]] for k in ("condition", "body"))
    test, state, start = condition.root, body.root, _skip_copies(loop.operand_names[0], caller)
    if (test.opcode, state.opcode, start.opcode) != ("compare", "tuple", "tuple"):
        return None
    counter, limit = (_find_value(name, condition) for name in test.operand_names)
    direction = _DIRECTION.findall(test.settings)[0]
    # A compiler may write `limit > i` for `i < limit`, and `1 + i` for `i + 1`.
    if isinstance(limit, _Element):
        counter, limit, direction = limit, counter, _MIRRORED.get(direction, "")
    if not isinstance(counter, _Element) or not isinstance(limit, int):
        return None
    first = _find_value(start.operand_names[counter.number], caller)
    change = _skip_copies(state.operand_names[counter.number], body)
    terms = [_find_value(name, body) for name in change.operand_names]
    if change.opcode == "add" and isinstance(terms[0], int):
        terms.reverse()
    step = terms[-1]
    if terms[0] != counter or not isinstance(first, int) or not isinstance(step, int):
        return None
    number = _INTEGER.match(change.type)
    if not number or ("type=UNSIGNED" in test.settings and number[1] == "s"):
        return None
    if change.opcode == "subtract":
        step = -step
    elif change.opcode != "add":
        return None
    turns = _count_steps(first, step, limit, direction)
    bits = int(number[2]) - (number[1] == "s")
    low = -(2**bits) if number[1] == "s" else 0
    # A counter that leaves its type's range wraps around.
    return turns if turns is not None and low <= first + turns * step < 2**bits else None


def _count_steps(first: int, step: int, limit: int, direction: str) -> int | None:
    """Count the steps from `first` while the comparison with `limit` is true; None for no end."""
    if direction == "NE":
        turns, rest = divmod(limit - first, step) if step else (-1, 0)
        return turns if turns >= 0 and not rest else None
    if direction in ("GT", "GE"):
        first, step, limit = -first, -step, -limit
    elif direction not in ("LT", "LE"):
        return None
    # The last step may pass the limit, so the number of steps is rounded up.
    way = limit - first + (direction in ("LE", "GE"))
    return 0 if way <= 0 else -(-way // step) if step > 0 else None


def _skip_copies(name: str, inside: Computation) -> Instruction:
    """Find the instruction that makes a value."""
    instruction = inside[name]
    while instruction.opcode in _COPIES:
        instruction = inside[instruction.operand_names[0]]
    return instruction


def _find_value(name: str, inside: Computation) -> int | _Element | None:
    """Find a constant's value, or the element of the parameter that a value is."""
    whole, _, index = name.partition("#")  # element 1 of a tuple may be printed as %tuple#1
    x = _skip_copies(whole, inside)
    if not index and x.opcode == "constant":
        return int(x.operands)
    if not index and x.opcode == "get-tuple-element":
        index = _INDEX.findall(x.settings)[0]
        x = _skip_copies(x.operand_names[0], inside)
    return _Element(int(index)) if index and x.opcode == "parameter" else None
