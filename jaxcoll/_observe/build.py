"""Builds a `Report`: reads a program's texts, matches what was requested with what was compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxcoll._observe.match import join
from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.parse.hlo import read_program
from jaxcoll._observe.parse.narrow_sums import narrow_sums
from jaxcoll._observe.parse.stablehlo import read_stablehlo
from jaxcoll._observe.report import Report
from jaxcoll._observe.report_data import PackedLeaves
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.plan import Plan

_HELD = ("argument", "output", "temp")


def report_of(
    compiled: str,
    requested: str | None = None,
    plans: Sequence[Plan] = (),
    where: str = "",
    terms: Terms | None = None,
    notes: Sequence[str] = (),
    memory: Mapping[str, int] | None = None,
) -> Report:
    """A report from texts alone: HLO, and the StableHLO that it came from, if that is known.

    `memory` is bytes on one device of arguments, results, results that take an argument's place,
    and all that is temporary, by XLA's names.
    """
    program = read_program(compiled)
    asked, more = (None, []) if requested is None else _requested(requested)
    known = program._replace(notes=(*program.notes, *more, *notes))._asdict()
    return Report(
        **known,
        where=where,
        requested=asked,
        origins=join(asked or (), program.collectives),
        packs=tuple(_packed(plans)),
        terms=terms,
        memory_bytes=sum(memory[x] for x in _HELD) - memory["alias"] if memory else None,
        plans=tuple(plans),
    )


def _requested(text: str) -> tuple[tuple[Collective, ...] | None, list[str]]:
    """What is requested, and notes; where its notation is not known, a note in its place."""
    try:
        return read_stablehlo(text), narrow_sums(text)
    except ValueError as error:
        return None, [f"what was requested could not be read: {error}"]


def _packed(plans: Sequence[Plan]) -> list[PackedLeaves]:
    found: dict[str, PackedLeaves] = {}
    for plan in plans:
        for k, pack in enumerate(plan.packs):
            name = f"{plan.name}/pack{k}"
            paths = tuple(dict.fromkeys(plan.leaves[s.leaf].path for s in pack.segments))
            found[name] = PackedLeaves(name, pack.shown_type, pack.nbytes, paths)
        for k, leaf in enumerate(plan.leaves):
            if leaf.gathers:
                name = f"{plan.name}/rows{k}"
                found[name] = PackedLeaves(name, leaf.dtype.name, leaf.gathers, (leaf.path,))
    return list(found.values())
