"""The names that a program's collectives have in a profile, and the order of its instructions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.parse.hlo_text import (
    Module,
    defined_name,
    pair_ends,
    parse_instruction,
    parse_module,
)

_CALLS = re.compile(
    r"\b(?:body|condition|calls|to_apply|(?:branch|called)_computations|"
    r"(?:true|false)_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_COMPUTATION = re.compile(r"[\w.\-]+")
_CHAIN = re.compile(r'chain_id="?(\w+)')
_STRUCTURE = ("while", "conditional", "call")
"""Instructions whose computations' instructions are executed, and have events, by themselves."""

_STARTS, _ENDS = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'  # targets of custom calls
WHOLE, START, DONE = 1, 2, 3
"""An event is the collective, or its beginning or end: then it lasts from the one to the other."""


class EventNames(NamedTuple):
    """How events refer to a program."""

    # By name of an event: the position of its collective, and WHOLE, START or DONE
    collectives: dict[str, tuple[int, int]]
    # By name of an instruction: its position in the schedule; in a loop, that of the loop
    order: dict[str, int]


def event_names(
    text: str, collectives: Sequence[Collective], wrapped: Mapping[str, str]
) -> EventNames:
    """Find the names of events that stand for each collective.

    A collective inside a fusion or an asynchronous wrapper has no event: on a TPU, what contains
    it has one; on a GPU, what it wraps (`wrapped`). One that a chain of fusions writes begins in
    the first and ends in the last; those between compute.
    """
    module = parse_module(text)
    callers = _callers(module)
    chain_of = _chains(module) if "chain_id=" in text else {}
    chain_of |= {
        defined_name(line): chain for home, chain in chain_of.items() for _, line in callers[home]
    }
    names: dict[str, tuple[int, int]] = {}
    for k, c in enumerate(collectives):
        chain = chain_of.get(c.computation, chain_of.get(c.name))
        parts = [name for name, of in chain_of.items() if of == chain] if chain else [c.computation]
        found = {c.name: WHOLE}
        for part in parts:
            found |= _sites(module, part, callers)
        names |= {name: (k, role) for name, role in found.items() if role}
    for lines in module.computations.values():
        for _, name, opcode, start in pair_ends(lines):
            if start in names and opcode.endswith("-done"):
                names[start], names[name] = (names[start][0], START), (names[start][0], DONE)
    names |= {inner: (names[start][0], WHOLE) for start, inner in wrapped.items() if start in names}
    return EventNames(names, _order(module, wrapped))


def _callers(module: Module) -> dict[str, list[tuple[str, str]]]:
    """Map each computation to the computations and the lines that call it."""
    callers: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, lines in module.computations.items():
        for line in lines:
            for callee in _called(line):
                callers[callee].append((name, line))
    return callers


def _called(line: str) -> Iterator[str]:
    for group in _CALLS.findall(line):
        yield from _COMPUTATION.findall(group)


def _chains(module: Module) -> dict[str, str]:
    """Map the computations that write a part of a chain to the chain's number."""
    return {
        name: chain[1]
        for name, lines in module.computations.items()
        if (chain := _CHAIN.search("\n".join(lines)))
    }


def _sites(
    module: Module, part: str, callers: Mapping[str, list[tuple[str, str]]]
) -> dict[str, int]:
    """Return the instructions with events of their own that contain a computation."""
    found: dict[str, int] = {}
    text = "\n".join(module.computations.get(part, ()))
    for caller, line in callers.get(part, ()):
        site = parse_instruction(line)
        if site.opcode in _STRUCTURE or site.opcode.endswith(("-done", "-update")):
            continue
        role = WHOLE
        if "chain_id=" in text:
            role = START if _STARTS in text else DONE if _ENDS in text else 0
        found |= {site.name: role} | _sites(module, caller, callers)
    return found


def _order(module: Module, wrapped: Mapping[str, str]) -> dict[str, int]:
    """Map each instruction that may have events to its position in the entry's schedule."""
    order: dict[str, int] = {}
    waiting = [(at, line) for at, line in enumerate(module.computations[module.entry])]
    opened: set[str] = set()
    while waiting:
        at, line = waiting.pop()
        name = defined_name(line)
        order |= {name: at, wrapped.get(name, name): at}
        for callee in () if " fusion(" in line else _called(line):
            if callee not in opened:
                opened.add(callee)
                waiting += [(at, inner) for inner in module.computations.get(callee, ())]
    return order
