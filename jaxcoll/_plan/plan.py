"""The plan that a trace carries out for one collective on a tree: packs and their algorithms."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import zlib
from typing import Any

from jaxcoll._plan.algorithms import Stage, align, stages, steps, wire_bytes
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import KEEP_APART, LANES, Pack, PackingRule, Segment, pad_size
from jaxcoll._plan.world import World

_PATH = operator.attrgetter("path")

THE_VALUE = "(the value)"
"""The name of a leaf that is the whole tree."""


@dataclasses.dataclass(frozen=True)
class CollectivePlan:
    """The plan of one `all_reduce`, or of one half of it, decided from shapes alone.

    `Plan` documents the attributes, and adds the text and the prediction.
    """

    reduce_op: ReduceOp
    leaves: tuple[Leaf, ...]
    packs: tuple[Pack, ...]
    world: World
    options: CommunicationOptions = dataclasses.field(compare=False)
    packing: PackingRule | None = dataclasses.field(default=None, compare=False)
    owners: int = 0
    overlap: bool = False
    in_backward: bool = False
    collective: str = "all_reduce"
    lanes: int = LANES
    notes: tuple[str, ...] = ()

    @property
    def reproducible(self) -> bool:
        """True if every element gets the same bits from any other reproducible plan."""
        return self.options.reproducible

    @property
    def algorithm(self) -> str:
        """The names of the packs' algorithms, joined by " and "."""
        return " and ".join(dict.fromkeys(pack.algorithm for pack in self.packs)) or "native"

    @functools.cached_property
    def name(self) -> str:
        """The name of the reduction in a program's scopes; equal plans share it.

        `jc.inspect` and profilers find packs by it: pack 3 travels as `<name>/pack3`.
        """
        # Not a counter: it would differ between processes. And JAX does not number scopes.
        packs = [(p.shown_type, p.algorithm, p.over, *map(tuple, p.segments)) for p in self.packs]
        identity = repr((self.reduce_op.name, *map(_PATH, self.leaves), packs))
        return f"{self.collective}_{zlib.crc32(identity.encode()) & 0xFFFFFF:06x}"

    @property
    def gathers(self) -> tuple[Leaf, ...]:
        """The `IndexedSlices` among the leaves, whose rows and indices every replica gathers."""
        return tuple(leaf for leaf in self.leaves if leaf.gathers)

    @property
    def wire_bytes(self) -> int:
        """Bytes sent by the device that sends most, padding included."""
        n = self.world.replicas
        if self.collective != "all_reduce":
            return sum(
                wire_bytes(self.stages(p), pad_size(p.size, n, self.lanes), p.dtype.itemsize) // 2
                for p in self.packs
            )
        packed = sum(
            wire_bytes(self.stages(p), sum(p.lengths), p.dtype.itemsize) for p in self.packs
        )
        return packed + sum((math.prod(x.over) - 1) * x.gathers for x in self.gathers)

    @property
    def steps(self) -> int:
        """Number of collectives requested; the compiler may combine native ones."""
        if self.collective != "all_reduce":
            return sum(steps(self.stages(pack), in_halves=True) for pack in self.packs) // 2
        of_packs = sum(steps(self.stages(pack)) for pack in self.packs)
        return of_packs + 2 * len(self.gathers)

    def stages(self, pack: Pack) -> tuple[Stage, ...]:
        """Return the stages that sum `pack`, inner axes first."""
        return stages(pack.algorithm, self.owners, pack.over, pack.format)

    def elements(self, pack: Pack) -> int:
        """Return the elements of the summed array; a wire format needs whole blocks per replica."""
        if not pack.format:
            return pack.size
        return align(self.stages(pack), sum(pack.lengths))

    @property
    def chained(self) -> bool:
        """True if each pack waits for the sum of the one before.

        This keeps the compiler from combining packs in any program on GPUs. On TPUs it would lose
        most of the overlap, and in a backward pass it would only delay gradients.
        """
        ordered = self.overlap and not self.in_backward and self.world.platform != "tpu"
        return ordered and self.collective == "all_reduce"

    def compiler_options(self, platform: str | None = None) -> dict[str, Any]:
        """Return compiler options that keep XLA from combining the packs of this plan.

        Args:
          platform: "cpu", "gpu" or "tpu"; None: that of the plan.

        Returns:
          Options for `jax.jit(..., compiler_options=...)`, which affect only that program; {} if
          none are needed.
        """
        platform = platform or self.world.platform
        kind = self.collective.replace("_", "-")
        if self.in_backward and self.collective != "all_reduce":
            kind = "loop"
        chained = platform == "gpu" and kind == "all-reduce" and not self.in_backward
        return dict(KEEP_APART.get((platform, kind), {}) if self.overlap and not chained else {})

    def carried(self, pack: int) -> str:
        """Return the first and last leaf of a pack, with the range of elements of a cut leaf."""

        def name(segment: Segment) -> str:
            leaf = self.leaves[segment.leaf]
            start, end = segment.start, segment.start + segment.size
            part = f" elements {start}:{end}" if segment.size < leaf.size else ""
            return (leaf.path or THE_VALUE) + part

        ends = (self.packs[pack].segments[0], self.packs[pack].segments[-1])
        return " … ".join(map(name, ends[: len(self.packs[pack].segments)]))
