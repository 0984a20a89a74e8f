"""Chains of fusions on TPUs, which start one transfer, continue it beside products, and end it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jaxcoll._hlo.hlo_text import Computation, Module, sends

_CHAIN = re.compile(r'\bchain_id="?(\w+)')
_CHAIN_PART = re.compile(r'\bcustom_call_target="AsyncCollective(Start|Done)"')

Chains = Mapping[str, Mapping[str, tuple[str, str]]]
"""By computation and name of its collectives: the number of a chain, and the part in it."""


def find_chains(module: Module) -> Chains:
    """Find the collectives of chains, with "Start", "Done" or "" for the part.

    A TPU v5e starts a transfer in one fusion, continues it in others beside products, and ends it
    in another; each has the collective in its text.
    """
    chains: dict[str, dict[str, tuple[str, str]]] = {}
    for name, inside in module.computations.items():
        for site in inside.sites:
            line_end = inside.text.find("\n", site.start)
            if sends(site.opcode) and inside.text.find("chain_id", site.start, line_end) > 0:
                collective = inside.parse(site)
                if number := _CHAIN.search(collective.attributes):
                    part = _find_part(inside, collective.name)
                    chains.setdefault(name, {})[collective.name] = number[1], part
    return chains


def _find_part(inside: Computation, collective: str) -> str:
    for site in inside.sites:
        if site.opcode == "custom-call" and collective in inside.parse(site).operand_names:
            if part := _CHAIN_PART.search(inside.parse(site).attributes):
                return part[1]
    return ""


def check_chains(chains: Chains) -> Iterator[str]:
    """Yield a note on each chain that no fusion starts."""
    parts = [part for collectives in chains.values() for part in collectives.values()]
    started = {number for number, part in parts if part == "Start"}
    for number in dict.fromkeys(number for number, _ in parts if number not in started):
        yield (
            f"a transfer in several fusions (chain_id={number!r}) has no start, which is not "
            "counted: the text looks truncated."
        )
