"""A predicted timeline as a Chrome trace, the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from jaxcoll._observe.parse.collective import Collective
from jaxcoll._observe.parse.names import names, pack_of
from jaxcoll._observe.report_data import ReportData
from jaxcoll._observe.timeline import timeline

_LANES = ("multiplies", "waits", "carries")


def trace(report: ReportData) -> dict[str, Any]:
    """One lane of matrix products, one of waiting, one of collectives, named by their packs."""
    played = timeline(report)
    events = [_event("matrix product", 0, start, end) for start, end in played.products]
    for sent in played.sent:
        collective = report.collectives[sent.k]
        name = _name(collective)
        about = {"instruction": collective.name, "wire bytes": collective.wire_bytes}
        events.append(_event(name, 2, sent.begins, sent.ends, **about))
        if sent.done > sent.asked:
            events.append(_event(f"waits for {name}", 1, sent.asked, sent.done))
    lanes = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": words}}
        for lane, words in enumerate(_LANES)
    ]
    return {"traceEvents": lanes + events, "displayTimeUnit": "ms"}


def _event(name: str, lane: int, start: float, end: float, **about: Any) -> dict[str, Any]:
    """A span, in microseconds."""
    span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "pid": 0, "tid": lane, **span, "args": about}


def _name(collective: Collective) -> str:
    packs = dict.fromkeys(pack for path in names(collective.op_name) if (pack := pack_of(path)))
    return ", ".join(packs) or collective.kind
