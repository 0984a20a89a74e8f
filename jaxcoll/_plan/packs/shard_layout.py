"""The layout of a tree in shards: packs, padded so that every replica has as much of each."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np

from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import LANES, UNPACKED, BytesPerPack, Pack, padded, plan_packs
from jaxcoll._show.units import counted

_MiB = 1 << 20
USUAL = BytesPerPack(16 * _MiB, 2 * _MiB)
"""Packs where nothing is asked. The same in every world, so that what is laid out outside a
program fits the one inside."""


class ShardedLeaf(Leaf):
    """A leaf that is in a pack even on a single replica."""

    @property
    def travels(self) -> bool:
        """True if a pack carries it: it holds something."""
        return self.size > 0


@dataclasses.dataclass(frozen=True, repr=False)
class ShardLayout:
    """The place of every element of a tree among the shards of n replicas, a hashable value.

    A pack's elements, in the order of its leaves and followed by zeros, make n × rows × 128; the
    first rows are the first replica's, and so on. The zeros are fewer than 128 n.
    """

    treedef: Hashable  # the tree's structure
    leaves: tuple[Leaf, ...]  # its leaves, in order; what they vary over beside is their `kind`
    packs: tuple[Pack, ...]  # which leaves lie one after another, of one dtype each
    replicas: int  # n

    def rows(self, pack: Pack) -> int:
        """Rows of 128 elements that one replica has of `pack`."""
        return padded(pack.size, self.replicas) // (self.replicas * LANES)

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
            f"ShardLayout({counted(len(self.leaves), 'leaf', 'leaves')} in "
            f"{counted(len(self.packs), 'pack')}, {counted(self.replicas, 'shard')} each)"
        )


class SummedLayout(ShardLayout):
    """The layout of a tree of which every replica holds a summand, in an array for each leaf."""

    def rows(self, pack: Pack) -> int:
        """Rows of 128 elements that one replica has of `pack`: those of all of it."""
        return padded(pack.size, 1) // LANES


def summed_layout(treedef: Hashable, leaves: Sequence[Leaf], replicas: int) -> SummedLayout:
    """The layout of float32 summands of a tree, one on each of `replicas`."""
    f32 = np.dtype(np.float32)
    alike = tuple(dataclasses.replace(x, dtype=f32, wire=f32, kind=()) for x in leaves)
    return SummedLayout(treedef, alike, plan_packs(alike, UNPACKED), replicas)


@functools.lru_cache(maxsize=256)
def layout_of(
    treedef: Hashable, leaves: tuple[Leaf, ...], replicas: int, bytes_per_pack: int = 0
) -> ShardLayout:
    """The layout of a tree over `replicas`, of its `ShardedLeaf`s before anything is cut.

    `bytes_per_pack` is the largest pack, but for a leaf that is larger; 0: 16 MiB, leaves over
    2 MiB alone.
    """
    rule = BytesPerPack(bytes_per_pack) if bytes_per_pack else USUAL
    return ShardLayout(treedef, leaves, plan_packs(leaves, rule), replicas)


def laid_over(layout: ShardLayout, sizes: tuple[int, ...]) -> ShardLayout:
    """The same leaves in the same packs, over axes of other sizes."""
    return dataclasses.replace(
        layout,
        leaves=tuple(dataclasses.replace(leaf, over=sizes) for leaf in layout.leaves),
        packs=tuple(dataclasses.replace(pack, over=sizes) for pack in layout.packs),
        replicas=math.prod(sizes),
    )


def first_difference(found: Sequence[Leaf], expected: Sequence[Leaf]) -> str:
    """In words, the first leaf in which two trees differ; "" if they have the same leaves."""
    before, now = {x.path: x for x in expected}, {x.path: x for x in found}
    for leaf in expected:
        if leaf.path not in now:
            return f"{where(leaf.path)} ({_type(leaf)}) is gone"
        if _type(now[leaf.path]) != _type(leaf):
            return f"{where(leaf.path)} is {_type(now[leaf.path])}, and was {_type(leaf)}"
    for leaf in found:
        if leaf.path not in before:
            return f"{where(leaf.path)} ({_type(leaf)}) is new"
    if [x.path for x in found] != [x.path for x in expected]:
        return "the leaves are in another order"
    return ""


def _type(leaf: Leaf) -> str:
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"
