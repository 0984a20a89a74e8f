"""The JSON of a plan: what stands in it of leaves and packs, and how the fields are read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxcoll._plan.cost.terms import terms_of
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import Pack
from jaxcoll._plan.world import World
from jaxcoll._show import codec

FORMAT = "jaxcoll plan"
VERSION = 1
SAME = ("collective", "reproducible", "overlap", "in_backward", "lanes")
"""Fields that are written as they are."""


def described(pack: Pack, leaves: Sequence[Leaf]) -> dict[str, Any]:
    """A pack for other programs, its leaves by their paths."""
    return {
        "dtype": pack.dtype.name,
        "format": pack.format,
        "algorithm": pack.algorithm,
        "elements": pack.size,
        "bytes": pack.nbytes,
        "leaves": [
            {"path": leaves[s.leaf].path, "start": s.start, "elements": s.size}
            for s in pack.segments
        ],
    }


def gathered(leaf: Leaf) -> dict[str, Any]:
    """A sparse leaf for other programs."""
    return {
        "path": leaf.path,
        "dtype": leaf.dtype.name,
        "indices": str(leaf.indices),
        "rows": leaf.shape[0],
        "bytes": leaf.gathers,
    }


def plain_kind(value: Leaf | Pack) -> dict[str, Any]:
    """All fields, to be read again; of the kind, which a program may hold as any value, words."""
    data = {**codec.plain(value), "kind": "" if value.kind == () else str(value.kind)}
    if isinstance(value, Pack):
        data["segments"] = [[s.leaf, s.start, s.size] for s in value.segments]
    return data


def fields(text: str) -> dict[str, Any]:
    """The arguments of the `Plan` that was written as JSON."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"{data['format']!r} of version {data['version']!r}")
        found = data["fields"]
        return {
            "reduce_op": ReduceOp[data["reduce_op"]],
            "leaves": tuple(_read(Leaf, leaf) for leaf in found["leaves"]),
            "packs": tuple(_read(Pack, pack) for pack in found["packs"]),
            "owners": found["owners"],
            "world": codec.read(World, found["world"]),
            "terms": terms_of(found["terms"]),
            "reasons": tuple(data["reasons"]),
            **{name: data[name] for name in SAME if name in data},
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected what `Plan.to_json` writes, version {VERSION}; got {text[:60]!r} "
            f"({type(error).__name__}: {error})."
        ) from error


def _read(kind: type, data: dict[str, Any]) -> Any:
    return codec.read(kind, {**data, "kind": data["kind"] or ()})
