"""A plan in plain numbers and strings, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcoll._plan.cost.terms import terms_of
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import Pack, Segment
from jaxcoll._plan.world import World

if TYPE_CHECKING:
    from jaxcoll._plan.plan import Plan

FORMAT = "jaxcoll plan"
VERSION = 1


def to_dict(plan: Plan) -> dict[str, Any]:
    """What can be derived, for whoever reads it; then `fields`, from which it is made again."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "collective": plan.collective,
        "reduce_op": plan.reduce_op.name,
        "algorithm": plan.algorithm,
        "reproducible": plan.reproducible,
        "overlap": plan.overlap,
        "in_backward": plan.in_backward,
        "checksum": plan.checksum,
        "platform": plan.world.platform,
        "replicas": plan.world.replicas,
        "axis_sizes": list(plan.world.sizes),
        "processes": plan.world.processes,
        "leaves": len(plan.leaves),
        "bytes": plan.nbytes,
        "steps": plan.steps,
        "wire_bytes_per_device": plan.wire_bytes,
        "temporary_bytes": plan.temporary_bytes,
        "predicted_seconds": plan.predicted.seconds,
        "predicted_from": plan.terms.source,
        "alternatives": [dataclasses.asdict(way) for way in plan.alternatives],
        "reasons": list(plan.reasons),
        "packs": [
            {
                "dtype": pack.dtype.name,
                "algorithm": pack.algorithm,
                "elements": pack.size,
                "bytes": pack.nbytes,
                "leaves": [
                    {"path": plan.leaves[s.leaf].path, "start": s.start, "elements": s.size}
                    for s in pack.segments
                ],
            }
            for pack in plan.packs
        ],
        "gathers": [
            {
                "path": leaf.path,
                "dtype": leaf.dtype.name,
                "indices": str(leaf.indices),
                "rows": leaf.shape[0],
                "bytes": leaf.gathers,
            }
            for leaf in plan.gathers
        ],
        "fields": {
            "leaves": [_leaf(leaf) for leaf in plan.leaves],
            "packs": [_pack(pack) for pack in plan.packs],
            "owners": plan.owners,
            "world": dataclasses.asdict(plan.world),
            "terms": plan.terms.to_dict(),
        },
    }


def fields(text: str) -> dict[str, Any]:
    """The arguments of the `Plan` that was written as JSON.

    Raises:
      ValueError: the text is no such JSON, or is damaged.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"{data['format']!r} of version {data['version']!r}")
        found = data["fields"]
        return {
            "reduce_op": ReduceOp[data["reduce_op"]],
            "leaves": tuple(_read_leaf(leaf) for leaf in found["leaves"]),
            "packs": tuple(_read_pack(pack) for pack in found["packs"]),
            "owners": found["owners"],
            "world": World(**{**found["world"], "sizes": tuple(found["world"]["sizes"])}),
            "terms": terms_of(found["terms"]),
            "reasons": tuple(data["reasons"]),
            "reproducible": data["reproducible"],
            "overlap": data.get("overlap", False),
            "in_backward": data.get("in_backward", False),
            "collective": data.get("collective", "all_reduce"),
            "checksum": data.get("checksum", False),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected what `Plan.to_json` writes, version {VERSION}; got {text[:60]!r} "
            f"({type(error).__name__}: {error})."
        ) from error


def _leaf(leaf: Leaf) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "wire": leaf.wire.name,
        "over": list(leaf.over),
        "kind": _said(leaf.kind),
        "solid": leaf.solid,
        "indices": leaf.indices and leaf.indices.name,
        "ready": leaf.ready,
    }


def _read_leaf(data: Mapping[str, Any]) -> Leaf:
    return Leaf(
        data["path"],
        tuple(data["shape"]),
        np.dtype(data["dtype"]),
        np.dtype(data["wire"]),
        tuple(data["over"]),
        data["kind"] or (),
        data["solid"],
        data["indices"] and np.dtype(data["indices"]),
        data.get("ready"),
    )


def _pack(pack: Pack) -> dict[str, Any]:
    return {
        "dtype": pack.dtype.name,
        "over": list(pack.over),
        "kind": _said(pack.kind),
        "segments": [[s.leaf, s.start, s.size] for s in pack.segments],
        "solid": pack.solid,
        "algorithm": pack.algorithm,
    }


def _read_pack(data: Mapping[str, Any]) -> Pack:
    return Pack(
        np.dtype(data["dtype"]),
        tuple(data["over"]),
        data["kind"] or (),
        tuple(Segment(*segment) for segment in data["segments"]),
        data["solid"],
        data["algorithm"],
    )


def _said(kind: Hashable) -> str:
    """Words for what a program groups leaves by; "" for nothing, as in plans from shapes."""
    return "" if kind == () else str(kind)
