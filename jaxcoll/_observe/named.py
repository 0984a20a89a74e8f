"""Reports of programs of which there is a profile and no text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxcoll._observe.overlap import Overlap
from jaxcoll._observe.parse.collective import KINDS, Collective
from jaxcoll._observe.profile import Event
from jaxcoll._observe.report import Report
from jaxcoll._observe.rows import Row

_KIND_OF = {
    "psum": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute", "pbroadcast": "collective-broadcast",
} | {kind: kind for kind in KINDS}  # fmt: skip
_COLLECTIVE = re.compile(rf"({'|'.join(sorted(_KIND_OF, reverse=True))})(?:-start)?(?:[.\-_]\d+)*$")


def named_reports(events: Iterable[Event]) -> list[Report]:
    """Return a report for each program that has instructions named as collectives are.

    JAX names an instruction after its function (`psum.3`), and XLA after its kind.
    """
    programs: dict[str, dict[str, str]] = {}
    devices: dict[str, set[int]] = {}
    for event in events:
        if name := _COLLECTIVE.match(event.instruction):
            programs.setdefault(event.module, {})[event.instruction] = _KIND_OF[name[1]]
            devices.setdefault(event.module, set()).add(event.device)
    return [
        Report(
            name=module,
            where="",
            devices=len(devices[module]),
            requested=None,
            rows=tuple(
                Row(Collective(kind, name, (), 0, (), module, trips=None))
                for name, kind in collectives.items()
            ),
            matmuls=(),
            loops=(),
            instructions=0,
            overlap=Overlap((), 0),
            unread=("its bytes: there is a profile of it, and not its text.",),
            unbounded=(),
            notes=(),
        )
        for module, collectives in programs.items()
    ]
