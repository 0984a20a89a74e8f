"""The layout of a tree in shards, and the plans of the two halves of an all-reduce over it.

Packs are padded so that all replicas have equal shards of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from jaxcoll._compression.format import find_format
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.choose import SHARDED, half_algorithm
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import (
    LANES,
    UNPACKED,
    BytesPerPack,
    Pack,
    Segment,
    pad_size,
    plan_packs,
)
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._plan.world import World
from jaxcoll._show.units import pluralize


@dataclasses.dataclass(frozen=True, repr=False)
class ShardLayout:
    """The position of every element of a tree in the shards of n replicas: a hashable value.

    A pack's elements, in the order of its leaves and followed by fewer than 128 n zeros, make n ×
    rows × 128 elements; the first `rows` belong to the first replica, and so on.
    """

    treedef: Hashable  # the tree's structure
    leaves: tuple[Leaf, ...]  # its leaves, in order; their `kind`: other axes they vary over
    packs: tuple[Pack, ...]  # leaves that lie one after another, of one dtype in each pack
    replicas: int  # n

    def rows(self, pack: Pack) -> int:
        """Return the rows of 128 elements that one replica has of `pack`."""
        return pad_size(pack.size, self.replicas) // (self.replicas * LANES)

    @property
    def nbytes(self) -> int:
        """Bytes of one replica's shards of such a tree, padding included."""
        return sum(self.rows(p) * LANES * p.dtype.itemsize for p in self.packs)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.treedef, self.leaves, self.replicas))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return (
            f"ShardLayout({pluralize(len(self.leaves), 'leaf', 'leaves')} in "
            f"{pluralize(len(self.packs), 'pack')}, {pluralize(self.replicas, 'shard')} each)"
        )


class SummedLayout(ShardLayout):
    """The layout of a tree of summands: every replica has all of it, in one array per leaf."""

    def rows(self, pack: Pack) -> int:
        """Return the rows of 128 elements of `pack`, all of which every replica has."""
        return pad_size(pack.size, 1) // LANES


def lay_out_summands(treedef: Hashable, leaves: Sequence[Leaf], replicas: int) -> SummedLayout:
    """Return the layout of a tree of float32 summands on each of `replicas`."""
    f32 = np.dtype(np.float32)
    alike = tuple(dataclasses.replace(x, dtype=f32, wire=f32, kind=()) for x in leaves)
    return SummedLayout(treedef, alike, plan_packs(alike, UNPACKED), replicas)


@functools.lru_cache(maxsize=256)
def lay_out(
    treedef: Hashable, leaves: tuple[Leaf, ...], replicas: int, bytes_per_pack: int = 0
) -> ShardLayout:
    """Return the layout over `replicas` of a tree, from its leaves before they are cut.

    A pack has at most `bytes_per_pack`, unless it is one larger leaf; 0: 16 MiB, and leaves of
    more than 2 MiB alone.
    """
    rule = BytesPerPack(bytes_per_pack) if bytes_per_pack else SHARDED
    return ShardLayout(treedef, leaves, plan_packs(leaves, rule), replicas)


def lay_out_over(layout: ShardLayout, sizes: tuple[int, ...]) -> ShardLayout:
    """Return the same leaves in the same packs, over axes of other sizes."""
    return dataclasses.replace(
        layout,
        leaves=tuple(dataclasses.replace(leaf, over=sizes) for leaf in layout.leaves),
        packs=tuple(dataclasses.replace(pack, over=sizes) for pack in layout.packs),
        replicas=math.prod(sizes),
    )


def first_difference(found: Sequence[Leaf], expected: Sequence[Leaf]) -> str:
    """Describe the first leaf in which two trees differ; "" if they have the same leaves."""
    before, now = {x.path: x for x in expected}, {x.path: x for x in found}
    for leaf in expected:
        if leaf.path not in now:
            return f"{where(leaf.path)} ({describe_type(leaf)}) is gone"
        now_is, was = describe_type(now[leaf.path]), describe_type(leaf)
        if now_is != was:
            return f"{where(leaf.path)} is {now_is}, and was {was}"
    for leaf in found:
        if leaf.path not in before:
            return f"{where(leaf.path)} ({describe_type(leaf)}) is new"
    if [x.path for x in found] != [x.path for x in expected]:
        return "the leaves are in another order"
    return ""


Half = Literal["reduce_scatter", "all_gather"]


def plan_half(
    half: Half,
    reduce_op: ReduceOp,
    packs: Sequence[Pack],
    leaves: Sequence[Leaf],
    options: CommunicationOptions,
    world: World,
) -> CollectivePlan:
    """Return the plan of one half, over packs with equally many rows on every replica."""
    if options.shards:
        raise ValueError(
            f"`{half}` has one shard for each replica, and `shards={options.shards}` asks for "
            "another number: leave `shards` unset."
        )
    if find_format(options.compression) is not None:
        raise ValueError(
            f"`{half}` sends values exactly, and `compression` {str(options.compression)!r} is for "
            "`all_reduce`: leave `compression` unset, or pass `compression=None` in the options of "
            "this call if they come from around it."
        )
    shared = {"over": world.sizes, "kind": (), "algorithm": half_algorithm(options, world)}
    return CollectivePlan(
        reduce_op=reduce_op,
        leaves=tuple(
            dataclasses.replace(x, over=world.sizes, kind=(), in_shards=False) for x in leaves
        ),
        packs=tuple(
            dataclasses.replace(p, dtype=leaves[p.segments[0].leaf].wire, **shared) for p in packs
        ),
        world=world,
        options=options,
        overlap=bool(options.overlap),
        collective=half,
    )


def plan_rows(
    half: Half,
    reduce_op: ReduceOp,
    leaves: Sequence[Leaf],
    packs: Sequence[Pack],
    options: CommunicationOptions,
    world: World,
    times: int,
    when: str,
) -> CollectivePlan:
    """Return the plan of one layer's leaves, cut along their first dimension, for all `times`."""
    n = world.replicas
    spans = [tuple(Segment(s.leaf, s.start * n, s.size * n) for s in p.segments) for p in packs]
    whole = [dataclasses.replace(p, segments=s) for p, s in zip(packs, spans, strict=True)]
    apart = world.platform == "gpu" if options.overlap is None else options.overlap
    plan = plan_half(half, reduce_op, whole, leaves, options.replace(overlap=UNSET), world)
    plan = dataclasses.replace(plan, lanes=1, overlap=apart, in_backward=True)
    note = (
        f"layers: one at a time, {when}: {pluralize(times, 'time')}, "
        f"{pluralize(times * plan.wire_bytes, 'wire byte')} a device in total"
    )
    return dataclasses.replace(plan, notes=(note,))
