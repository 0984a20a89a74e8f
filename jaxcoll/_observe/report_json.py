"""A report in plain numbers and strings, and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jaxcoll._observe.match import Origin
from jaxcoll._observe.parse.collective import Collective, Groups
from jaxcoll._observe.report_data import PackedLeaves, ReportData
from jaxcoll._plan.cost.terms import terms_of
from jaxcoll._show import codec

_SAME = ("name", "where", "devices", "instructions", "uncounted", "notes")


def to_dict(report: ReportData) -> dict[str, Any]:
    """The report's own fields, and beside them what can be derived: totals, packs, changes."""
    groups: dict[Groups, int] = {}
    requested = None
    if report.requested is not None:
        requested = [_collective(r, groups) for r in report.requested]
    compiled = [
        {
            **_collective(c, groups),
            "requested": list(origin.requested),
            "requested_known_by": origin.by,
            "again": origin.again,
            "packs": list(report.packs_of(k)),
            "leaves": list(report.leaves_of(k)),
            "changes": list(report.changes(k)),
            "predicted_seconds": report.seconds_of(k),
            "exposed_seconds": report.exposed_of(k),
        }
        for k, (c, origin) in enumerate(zip(report.collectives, report.origins, strict=True))
    ]
    return {
        **{name: codec.plain(getattr(report, name)) for name in _SAME},
        "count": report.count,
        "runs": report.runs,
        "wire_bytes_per_device": report.wire_bytes,
        "requested_wire_bytes_per_device": report.requested_wire_bytes,
        "overlap": {
            "overlapped": report.overlapped,
            "bytes": {
                kind: {"sent": s.nbytes, "behind_matmuls": s.behind}
                for kind, s in report.overlap.shares.items()
            },
            "flops": report.overlap.flops,
            "seconds": report.seconds,
            "exposed_seconds": report.exposed_seconds,
        },
        "dropped": list(report.dropped),
        "requested": requested,
        "compiled": compiled,
        "groups": [[list(group) for group in each] for each in groups],
        "packs": [
            {"name": p.name, "dtype": p.dtype, "bytes": p.nbytes, "leaves": list(p.leaves)}
            for p in report.packs
        ],
        "matmuls": [list(codec.plain(m).values()) for m in report.matmuls],
        "loops": [list(codec.plain(x).values()) for x in report.loops],
        "terms": None if report.terms is None else report.terms.to_dict(),
        "memory_bytes_per_device": report.memory_bytes,
    }


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the `Report` that `to_dict` took apart."""
    groups = codec.read(tuple[Groups, ...], data["groups"])
    asked, made = data["requested"], data["compiled"]
    kinds = typing.get_type_hints(ReportData)
    return {
        **{name: codec.read(kinds[name], data[name]) for name in (*_SAME, "matmuls", "loops")},
        "requested": None if asked is None else tuple(_read(r, groups) for r in asked),
        "collectives": tuple(_read(c, groups) for c in made),
        "origins": codec.read(
            tuple[Origin, ...],
            [[c["requested"], c["requested_known_by"], c["again"]] for c in made],
        ),
        "packs": codec.read(
            tuple[PackedLeaves, ...],
            [[p[key] for key in ("name", "dtype", "bytes", "leaves")] for p in data["packs"]],
        ),
        "terms": None if data["terms"] is None else terms_of(data["terms"]),
        "memory_bytes": data.get("memory_bytes_per_device"),
    }


def _collective(c: Collective, groups: dict[Groups, int]) -> dict[str, Any]:
    return codec.plain(c) | {
        "operands": [[operand.dtype, list(operand.shape)] for operand in c.operands],
        "groups": groups.setdefault(c.groups, len(groups)),  # each once; they are long
        "bytes": c.nbytes,
        "wire_bytes": c.wire_bytes,
    }


def _read(data: Mapping[str, Any], groups: tuple[Groups, ...]) -> Collective:
    known = {f.name: data[f.name] for f in dataclasses.fields(Collective) if f.name in data}
    return codec.read(Collective, {**known, "groups": groups[data["groups"]]})
