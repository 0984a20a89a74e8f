"""How often a loop turns, where the compiler dropped its count and the text still shows it."""

from __future__ import annotations

import re

from jaxcoll._observe.parse.hlo_text import Computation, Instruction, Module

_PARTS = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_NUMBER = re.compile(r"-?\d+")
_INDEX = re.compile(r"\bindex=(\d+)")


def turns(module: Module, loop: Instruction, caller: Computation) -> int | None:
    """How often a `while` turns; LookupError where the text lacks something of it.

    Law: a number only if a counter begins at a constant, grows by one in each turn, and the loop
    goes on while it is less than another constant; otherwise None.
    """
    parts = dict(_PARTS.findall(loop.attributes))
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
