"""How often a loop turns, where the compiler dropped its count and the text still shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxcoll._observe.parse.hlo_text import (
    Instruction,
    Module,
    definitions,
    operand_names,
    parse_instruction,
)

_PARTS = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_NUMBER = re.compile(r"-?\d+")
_INDEX = re.compile(r"\bindex=(\d+)")

Defined = Mapping[str, str]


def turns(module: Module, loop: Instruction, defined: Defined) -> int | None:
    """How often a `while` turns; LookupError where the text lacks something of it.

    Law: a number only if a counter begins at a constant, grows by one in each turn, and the loop
    goes on while it is less than another constant; otherwise None.
    """
    parts = dict(_PARTS.findall(loop.attributes))
    tested, body = (definitions(module.computations[parts[k]]) for k in ("condition", "body"))
    test, state = _root(tested), _root(body)
    start = _made(operand_names(loop)[0], defined)
    if (test.opcode, state.opcode, start.opcode) != ("compare", "tuple", "tuple"):
        return None
    counter, limit = (_made(name, tested) for name in operand_names(test))
    k, last = _element(counter, tested), _constant(limit)
    if k is None or last is None or "direction=LT" not in test.attributes:
        return None
    step = _made(operand_names(state)[k], body)
    first = _constant(_made(operand_names(start)[k], defined))
    if step.opcode != "add" or first is None:
        return None
    added = [_made(name, body) for name in operand_names(step)]
    if {_element(x, body) for x in added} != {k, None} or 1 not in map(_constant, added):
        return None
    return max(last - first, 0)


def _root(defined: Defined) -> Instruction:
    (root,) = (line for line in defined.values() if line.lstrip().startswith("ROOT "))
    return parse_instruction(root)


def _made(name: str, defined: Defined) -> Instruction:
    """What makes a value, seen through copies of it."""
    found = parse_instruction(defined[name])
    while found.opcode == "copy":
        found = parse_instruction(defined[operand_names(found)[0]])
    return found


def _element(x: Instruction, defined: Defined) -> int | None:
    """Which element of its computation's only parameter it is."""
    if x.opcode != "get-tuple-element":
        return None
    of, index = _made(operand_names(x)[0], defined), _INDEX.search(x.attributes)
    return int(index[1]) if of.opcode == "parameter" and index else None


def _constant(x: Instruction) -> int | None:
    return int(x.operands) if x.opcode == "constant" and _NUMBER.fullmatch(x.operands) else None
