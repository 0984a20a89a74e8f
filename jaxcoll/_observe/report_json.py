"""A report in plain numbers and strings, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxcoll._observe.match import Origin
from jaxcoll._observe.parse.calls import Loop, Matmul
from jaxcoll._observe.parse.collective import Collective, Groups, Meanwhile, Operand
from jaxcoll._plan.cost.terms import terms_of

if TYPE_CHECKING:
    from jaxcoll._observe.report import Report


def to_dict(report: Report) -> dict[str, Any]:
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
        "name": report.name,
        "where": report.where,
        "devices": report.devices,
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
        "matmuls": [[m.name, m.flops, m.trips, m.at, m.dtype] for m in report.matmuls],
        "loops": [[x.name, x.trips, x.at, x.until] for x in report.loops],
        "instructions": report.instructions,
        "uncounted": list(report.uncounted),
        "notes": list(report.notes),
        "terms": None if report.terms is None else report.terms.to_dict(),
    }


def fields(data: Mapping[str, Any], pack: type) -> dict[str, Any]:
    """The fields of the report that `to_dict` took apart.

    Args:
      data: what `to_dict` returned.
      pack: the class of `Report.packs`.

    Returns:
      The arguments of `Report`.
    """
    groups = [tuple(tuple(group) for group in each) for each in data["groups"]]
    asked = data["requested"]
    return {
        "name": data["name"],
        "where": data["where"],
        "devices": data["devices"],
        "requested": None if asked is None else tuple(_read(r, groups) for r in asked),
        "collectives": tuple(_read(c, groups) for c in data["compiled"]),
        "origins": tuple(
            Origin(tuple(c["requested"]), c["requested_known_by"], c["again"])
            for c in data["compiled"]
        ),
        "packs": tuple(
            pack(p["name"], p["dtype"], p["bytes"], tuple(p["leaves"])) for p in data["packs"]
        ),
        "matmuls": tuple(Matmul(*m) for m in data["matmuls"]),
        "loops": tuple(Loop(*x) for x in data["loops"]),
        "instructions": data["instructions"],
        "uncounted": tuple(data["uncounted"]),
        "notes": tuple(data["notes"]),
        "terms": None if data["terms"] is None else terms_of(data["terms"]),
    }


def _collective(c: Collective, groups: dict[Groups, int]) -> dict[str, Any]:
    return {
        "kind": c.kind,
        "name": c.name,
        "operands": [[operand.dtype, list(operand.shape)] for operand in c.operands],
        "bytes": c.nbytes,
        "wire_bytes": c.wire_bytes,
        "trips": c.trips,
        "group_size": c.group_size,
        "groups": groups.setdefault(c.groups, len(groups)),
        "computation": c.computation,
        "loops": list(c.loops),
        "branches": [list(branch) for branch in c.branches],
        "is_async": c.is_async,
        "meanwhile": None if c.meanwhile is None else c.meanwhile._asdict(),
        "at": c.at,
        "until": c.until,
        "op_name": c.op_name,
        "source": c.source,
    }


def _read(data: Mapping[str, Any], groups: list[Groups]) -> Collective:
    during = data["meanwhile"]
    same = ("kind", "name", "group_size", "computation", "trips", "is_async", "op_name", "source")
    return Collective(
        **{key: data[key] for key in (*same, "at", "until")},
        operands=tuple(Operand(dtype, tuple(shape)) for dtype, shape in data["operands"]),
        groups=groups[data["groups"]],
        branches=tuple((site, branch) for site, branch in data["branches"]),
        loops=tuple(data["loops"]),
        meanwhile=None if during is None else Meanwhile(**during),
    )
