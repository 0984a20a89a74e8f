"""From shapes to packs, and nothing else: which elements travel together.

A plan is a frozen, hashable value. It is made of segments (runs of elements of one leaf), so
its inverse needs no state: reading the packs in order gives back every leaf, to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from jaxcoll._plan.leaves import Leaf


@dataclasses.dataclass(frozen=True)
class BytesPerPack:
    """Close a pack before it would exceed `limit` bytes; a larger leaf travels alone."""

    limit: int


@dataclasses.dataclass(frozen=True)
class NumPacks:
    """`count` packs of near-equal bytes; leaves are cut where a pack ends."""

    count: int


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """Every leaf travels alone, in its own shape."""


PackingRule = BytesPerPack | NumPacks | Unpacked


@dataclasses.dataclass(frozen=True)
class Segment:
    """Elements `[start, start + size)` of the flattened leaf number `leaf`."""

    leaf: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Pack:
    """What travels as one array: segments of one dtype, in order."""

    dtype: np.dtype
    kind: Hashable
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Elements on one replica."""
        return sum(s.size for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes on one replica."""
        return self.size * self.dtype.itemsize


def plan_packs(leaves: Sequence[Leaf], rule: PackingRule) -> tuple[Pack, ...]:
    """Assign every element of every leaf to exactly one pack.

    Law: a pack holds one dtype and one kind; leaves keep their order inside a pack; empty
    leaves, and those that stay, are in none. Packs are ordered by the first leaf they carry.

    Args:
      leaves: the leaves of a tree, in its order.
      rule: what closes a pack.

    Returns:
      The packs, ordered by the leaf they begin with.
    """
    packs = [
        Pack(leaf.wire, leaf.kind, (Segment(i, 0, leaf.size),))
        for i, leaf in enumerate(leaves)
        if leaf.travels and (leaf.solid or isinstance(rule, Unpacked))
    ]
    if not isinstance(rule, Unpacked):
        groups = _groups(leaves)
        counts = _shares(leaves, list(groups.values()), rule)
        for ((dtype, kind), members), count in zip(groups.items(), counts, strict=True):
            cut = (
                _close_before(leaves, members, rule.limit)
                if isinstance(rule, BytesPerPack)
                else _cut_evenly(leaves, members, count)
            )
            packs += [Pack(dtype, kind, tuple(segments)) for segments in cut]
    return tuple(sorted(packs, key=lambda p: (p.segments[0].leaf, p.segments[0].start)))


def _groups(leaves: Sequence[Leaf]) -> dict[tuple[np.dtype, Hashable], list[int]]:
    """Indices of the leaves that may share packs, by what they must agree in."""
    groups: dict[tuple[np.dtype, Hashable], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.travels and not leaf.solid:
            groups.setdefault((leaf.wire, leaf.kind), []).append(i)
    return groups


def _close_before(
    leaves: Sequence[Leaf], members: Sequence[int], limit: int
) -> Iterator[list[Segment]]:
    """Greedy, in order: the pack at hand is closed when the next leaf would pass the limit.

    A leaf that fits into no pack travels past it, so that the small leaves between large ones
    (a bias after every matrix) still meet.
    """
    pack: list[Segment] = []
    nbytes = 0
    for i in members:
        if leaves[i].nbytes > limit:
            yield [Segment(i, 0, leaves[i].size)]
            continue
        if nbytes + leaves[i].nbytes > limit:
            yield pack
            pack, nbytes = [], 0
        pack.append(Segment(i, 0, leaves[i].size))
        nbytes += leaves[i].nbytes
    if pack:
        yield pack


def _cut_evenly(
    leaves: Sequence[Leaf], members: Sequence[int], count: int
) -> Iterator[list[Segment]]:
    """`count` runs of the flattened group whose sizes differ by one element at most."""
    total = sum(leaves[i].size for i in members)
    sizes = [total // count + (k < total % count) for k in range(count)]
    waiting = iter(members)
    leaf, start = next(waiting), 0
    for size in sizes:
        pack: list[Segment] = []
        while size:
            if start == leaves[leaf].size:
                leaf, start = next(waiting), 0
            step = min(size, leaves[leaf].size - start)
            pack.append(Segment(leaf, start, step))
            start, size = start + step, size - step
        yield pack


def _shares(
    leaves: Sequence[Leaf], groups: Sequence[Sequence[int]], rule: PackingRule
) -> list[int]:
    """How many of `NumPacks` packs each group gets: one each, then always to the largest pack."""
    shares = [1] * len(groups)
    if isinstance(rule, NumPacks):
        sizes = [sum(leaves[i].size for i in members) for members in groups]
        widths = [leaves[members[0]].wire.itemsize for members in groups]
        for _ in range(rule.count - len(groups)):
            per_pack = [
                size * width / k if k < size else 0
                for size, width, k in zip(sizes, widths, shares, strict=True)
            ]
            if not any(per_pack):
                break
            shares[per_pack.index(max(per_pack))] += 1
    return shares
