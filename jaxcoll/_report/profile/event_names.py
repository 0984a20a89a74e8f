"""The names that a program's collectives have in a profile, and the order of its instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxcoll._hlo.chains import find_chains
from jaxcoll._hlo.collective import Collective
from jaxcoll._hlo.hlo_text import Instruction, Module, parse_module

_STRUCTURE = ("while", "conditional", "call")
"""Instructions whose computations' instructions are executed, and have events, by themselves."""

WHOLE, START, DONE = 1, 2, 3
"""An event is the collective, or its beginning or end: then it lasts from the one to the other."""


class EventNames(NamedTuple):
    """The names by which events refer to a program."""

    # By name of an event: the position of its collective, and WHOLE, START or DONE
    collectives: dict[str, tuple[int, int]]
    # By name of an instruction: its position in the schedule; in a loop, that of the loop
    order: dict[str, int]
    # The instructions that every run executes; those of the entry computation
    every: frozenset[str]


def event_names(
    text: str, collectives: Sequence[Collective], wrapped: Mapping[str, str]
) -> EventNames:
    """Find the names of events that stand for each collective.

    A collective inside a fusion or an asynchronous wrapper has no event: on a TPU, what contains
    it has one; on a GPU, what it wraps (`wrapped`). One that a chain of fusions writes begins in
    the first and ends in the last; those between compute.
    """
    module = parse_module(text)
    callers = _find_callers(module)
    chains = _map_chains(module)
    names: dict[str, tuple[int, int]] = {}
    for k, c in enumerate(collectives):
        names[c.name] = (k, WHOLE)
        for part, role in chains.get(c.name, {c.computation: WHOLE}).items():
            if role:
                names |= dict.fromkeys(_find_sites(part, callers), (k, role))
    # Two events of an asynchronous pair: its time is from the begin of the first to the end of the
    # second.
    for inside in module.computations.values():
        for site, name, start in inside.ends():
            if start in names and site.opcode.endswith("-done"):
                k, _ = names[start]
                names[start], names[name] = (k, START), (k, DONE)
    names |= {inner: (names[start][0], WHOLE) for start, inner in wrapped.items() if start in names}
    every = frozenset(wrapped.get(x, x) for x in module.computations[module.entry].names)
    return EventNames(names, _order(module, wrapped), every)


def _find_callers(module: Module) -> dict[str, list[tuple[str, Instruction]]]:
    callers: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
    for name, inside in module.computations.items():
        for site in map(inside.parse, inside.sites):
            for _, callee in site.calls:
                callers[callee].append((name, site))
    return callers


def _map_chains(module: Module) -> dict[str, dict[str, int]]:
    """Map each collective of a chain to the computations that write it, and their parts in it."""
    chains: dict[str, dict[str, int]] = defaultdict(dict)
    chain_of: dict[str, dict[str, int]] = {}
    for name, collectives in find_chains(module).items():
        for collective, (number, part) in collectives.items():
            chains[number][name] = {"Start": START, "Done": DONE}.get(part, 0)
            chain_of[collective] = chains[number]
    return chain_of


def _find_sites(part: str, callers: Mapping[str, list[tuple[str, Instruction]]]) -> list[str]:
    """Find the instructions with events of their own that contain a computation."""
    found: list[str] = []
    for caller, site in callers.get(part, ()):
        if site.opcode not in _STRUCTURE and not site.opcode.endswith(("-done", "-update")):
            found += [site.name, *_find_sites(caller, callers)]
    return found


def _order(module: Module, wrapped: Mapping[str, str]) -> dict[str, int]:
    """Map each instruction that may have events to its position in the entry's schedule."""
    order: dict[str, int] = {}

    def add(computation: str, position: int | None) -> None:
        inside = module.computations[computation]
        for at, name in enumerate(inside.names):
            order.setdefault(name, at if position is None else position)
            order.setdefault(wrapped.get(name, name), order[name])
        for site in inside.sites:
            for _, callee in () if site.opcode == "fusion" else inside.parse(site).calls:
                if callee in module.computations and callee not in opened:
                    opened.add(callee)
                    add(callee, site.at if position is None else position)

    opened = {module.entry}
    add(module.entry, None)
    return order
