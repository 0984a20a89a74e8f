"""The plan of one reduction: a frozen value that is shown, saved, and then carried out."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

from jaxcoll._plan.algorithms import Stage, stages, steps, wire_elements
from jaxcoll._plan.choose import choose
from jaxcoll._plan.leaves import Leaf
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packing import Pack, PackingRule, cut, plan_packs
from jaxcoll._plan.world import World


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one `all_reduce` will send, decided from shapes alone.

    `str(plan)` is a table; `plan.to_json()` the same for machines.

    Attributes:
      reduce_op: SUM or MEAN.
      leaves: the leaves of the tree, in its order.
      packs: the arrays that travel; see `jaxcoll._plan.packing`.
      algorithm: the name of the algorithm that sums them; "inner/outer" for one of two parts.
      owners: replicas that sum a shard each, in a shuffle; 0: all of them.
      world: where it runs.
      reasons: one sentence for each decision, what was asked and not done included.
    """

    reduce_op: ReduceOp
    leaves: tuple[Leaf, ...]
    packs: tuple[Pack, ...]
    algorithm: str
    owners: int
    world: World
    reasons: tuple[str, ...]

    @functools.cached_property
    def name(self) -> str:
        """What the reduction is called in a program's scopes; equal plans share it.

        `jc.inspect` and profilers find packs by it: pack 3 travels as `<name>/pack3`.
        """
        packs = [
            (pack.dtype.name, pack.over, [(s.leaf, s.start, s.size) for s in pack.segments])
            for pack in self.packs
        ]
        told = repr((self.reduce_op.name, self.algorithm, [x.path for x in self.leaves], packs))
        return f"all_reduce_{zlib.crc32(told.encode()) & 0xFFFFFF:06x}"

    @property
    def gathers(self) -> tuple[Leaf, ...]:
        """The `IndexedSlices` among the leaves, whose rows and indices every replica gathers."""
        return tuple(leaf for leaf in self.leaves if leaf.gathers)

    @property
    def nbytes(self) -> int:
        """Bytes that one replica puts into all packs and gathers together."""
        return sum(p.nbytes for p in self.packs) + sum(leaf.gathers for leaf in self.gathers)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave the device that sends most, padding included."""
        packed = sum(wire_elements(self.stages(p), p.size) * p.dtype.itemsize for p in self.packs)
        return packed + sum((math.prod(x.over) - 1) * x.gathers for x in self.gathers)

    @property
    def steps(self) -> int:
        """Collectives that are requested; the compiler may combine those of its own kind."""
        return sum(steps(self.stages(pack)) for pack in self.packs) + 2 * len(self.gathers)

    def stages(self, pack: Pack) -> tuple[Stage, ...]:
        """What is done along each axis to sum `pack`, inner first."""
        # A shard of an array that must keep its shape would have none.
        return stages("native" if pack.solid else self.algorithm, self.owners, pack.over)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain numbers and strings, bytes and elements counted on one replica."""
        return {
            "reduce_op": self.reduce_op.name,
            "algorithm": self.algorithm,
            "platform": self.world.platform,
            "replicas": self.world.replicas,
            "axis_sizes": list(self.world.sizes),
            "processes": self.world.processes,
            "leaves": len(self.leaves),
            "bytes": self.nbytes,
            "steps": self.steps,
            "wire_bytes_per_device": self.wire_bytes,
            "reasons": list(self.reasons),
            "packs": [
                {
                    "dtype": pack.dtype.name,
                    "elements": pack.size,
                    "bytes": pack.nbytes,
                    "leaves": [
                        {"path": self.leaves[s.leaf].path, "start": s.start, "elements": s.size}
                        for s in pack.segments
                    ],
                }
                for pack in self.packs
            ],
            "gathers": [
                {
                    "path": leaf.path,
                    "dtype": leaf.dtype.name,
                    "indices": str(leaf.indices),
                    "rows": leaf.shape[0],
                    "bytes": leaf.gathers,
                }
                for leaf in self.gathers
            ],
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table's cells: pack or "rows", dtype on the wire, leaves, bytes, what it carries."""
        return [
            (
                str(k),
                pack.dtype.name,
                str(len(pack.segments)),
                f"{pack.nbytes:,}",
                _carried(self.leaves, pack),
            )
            for k, pack in enumerate(self.packs)
        ] + [
            ("rows", leaf.dtype.name, "1", f"{leaf.gathers:,}", leaf.path or "(the value)")
            for leaf in self.gathers
        ]

    def __str__(self) -> str:
        head = (
            f"all_reduce {self.reduce_op.name} of {len(self.leaves)} leaves, {self.nbytes:,} bytes "
            f"a replica, over {self.world}: {len(self.packs) + 2 * len(self.gathers)} arrays, "
            f"{self.steps} steps, {self.wire_bytes:,} wire bytes a device"
        )
        table = [("pack", "dtype", "leaves", "bytes", "carries"), *self.rows()]
        widths = [max(len(row[c]) for row in table) for c in range(4)]
        lines = [
            "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[4]])
            for row in table
        ]
        return "\n".join([head, *lines, *self.reasons])


def _carried(leaves: Sequence[Leaf], pack: Pack) -> str:
    """The first and the last leaf of a pack, with the part of it where it is cut."""

    def name(segment: Any) -> str:
        leaf = leaves[segment.leaf]
        cut = segment.size < leaf.size
        part = f" elements {segment.start}:{segment.start + segment.size}" if cut else ""
        return (leaf.path or "(the value)") + part

    first, last = name(pack.segments[0]), name(pack.segments[-1])
    return first if len(pack.segments) == 1 else f"{first} … {last}"


def make_plan(
    reduce_op: ReduceOp,
    leaves: Sequence[Leaf],
    options: CommunicationOptions,
    world: World,
    packing: PackingRule | None = None,
) -> Plan:
    """Decide everything about one reduction from shapes, options and the world.

    Raises:
      ValueError: the options ask for an algorithm that does not fit the axes.
    """
    choice = choose(options, world, packing)
    packs = cut(plan_packs(leaves, choice.packing), choice.parts)
    reasons = list(choice.reasons)
    widened = sorted({f"{x.dtype.name} as {x.wire.name}" for x in leaves if x.wire != x.dtype})
    if widened:
        reasons.append(f"dtypes: {', '.join(widened)}")
    if choice.algorithm != "native" and any(pack.solid for pack in packs):
        reasons.append(
            "leaves that are sharded over another axis: by the compiler's own all-reduce, which "
            "alone leaves them in their shape"
        )
    if any(leaf.gathers for leaf in leaves):
        reasons.append(
            "sparse leaves: their rows and indices, by the compiler's own all-gather, in no pack"
        )
    return Plan(
        reduce_op, tuple(leaves), packs, choice.algorithm, choice.owners, world, tuple(reasons)
    )
