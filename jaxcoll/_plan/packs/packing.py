"""From shapes to packs, and nothing else: which elements travel together.

A plan is a frozen, hashable value. It is made of segments (runs of elements of one leaf), so
its inverse needs no state: reading the packs in order gives back every leaf, to the bit.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from jaxcoll._plan import wire_formats
from jaxcoll._plan.packs.leaves import Leaf


@dataclasses.dataclass(frozen=True)
class BytesPerPack:
    """Close a pack before it would exceed `limit` bytes; a larger leaf travels alone.

    With `alone`, leaves of more than so many bytes do: a copy in and out can cost more than an
    array of their own.
    """

    limit: int
    alone: int | None = None

    @property
    def largest(self) -> int:
        """Bytes of the largest leaf that shares a pack."""
        return self.limit if self.alone is None else min(self.limit, self.alone)


UNPACKED = BytesPerPack(0)
"""Every leaf travels alone, in its own shape."""


@dataclasses.dataclass(frozen=True)
class NumPacks:
    """`count` packs of near-equal bytes; leaves are cut where a pack ends."""

    count: int


@dataclasses.dataclass(frozen=True)
class GroupSmall:
    """Runs of neighbouring leaves of at most `max_bytes` each travel in groups; others alone.

    A run is of one dtype and kind, and a larger leaf ends it; a group has at most `max_group`
    leaves.
    """

    max_bytes: int
    max_group: int


@dataclasses.dataclass(frozen=True)
class ReadyOrder:
    """Packs in the order in which leaves become ready, small ones at the end.

    A pack holds at most `limit` bytes, and at most a quarter of what is still to come with it; but
    `last` bytes in any case. So what is left when nothing is computed any more is small. Leaves
    of more than `limit` bytes travel alone and whole; only towards the end leaves are cut. Those
    of less than `small` bytes, `last` bytes of them at most, wait for the last pack, so that they
    cost the large ones between them no copy.
    """

    limit: int
    last: int
    small: int


PackingRule = BytesPerPack | NumPacks | GroupSmall | ReadyOrder


@dataclasses.dataclass(frozen=True)
class Segment:
    """Elements `[start, start + size)` of the flattened leaf number `leaf`."""

    leaf: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Pack:
    """What travels as one array: segments of one dtype, in order."""

    dtype: np.dtype  # the type it is summed in, and travels in where no format is named
    # Sizes of the reduction's axes, outer first; 1 along those it is not summed over
    over: tuple[int, ...]
    kind: Hashable  # what its leaves agree in beside
    segments: tuple[Segment, ...]  # what it carries
    solid: bool = False  # it is one whole leaf, which must keep its shape
    algorithm: str = "native"  # what sums it, a canonical name; "inner/outer" for one of two parts
    # The wire format it travels in; of two parts the outer one does. "": exactly
    format: str = ""

    @functools.cached_property
    def size(self) -> int:
        """Elements on one replica."""
        return sum(s.size for s in self.segments)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements that each segment takes: in a wire format those of its last block, too."""
        if not self.format:
            return tuple(s.size for s in self.segments)
        return tuple(wire_formats.of(self.format).padded(s.size) for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes on one replica."""
        return self.size * self.dtype.itemsize

    @property
    def shown_type(self) -> str:
        """The type it is summed in, and the format it travels in, as tables have it."""
        return f"{self.dtype.name} as {self.format}" if self.format else self.dtype.name

    def is_leaf(self, leaves: Sequence[Leaf]) -> bool:
        """Whether it is one whole leaf, which is not copied."""
        return len(self.segments) == 1 and self.size == leaves[self.segments[0].leaf].size


def plan_packs(leaves: Sequence[Leaf], rule: PackingRule) -> tuple[Pack, ...]:
    """Assign every element of every leaf to exactly one pack.

    Law: a pack holds one dtype and one kind, summed over the same axes; leaves keep their order
    inside a pack; leaves that do not travel are in none. Packs are ordered by the first leaf
    they carry; with `ReadyOrder` leaves and packs are in the order in which they are ready.
    """
    runs = [[Segment(i, 0, x.size)] for i, x in enumerate(leaves) if x.travels and x.solid]
    if rule == UNPACKED:
        runs = [[Segment(i, 0, x.size)] for i, x in enumerate(leaves) if x.travels]
    else:
        runs += _shared(leaves, rule)
    packs = [
        Pack(first.wire, first.over, first.kind, tuple(run), first.solid, format=first.format)
        for run in runs
        for first in [leaves[run[0].leaf]]
    ]
    if isinstance(rule, ReadyOrder):
        return tuple(sorted(packs, key=lambda p: max(_ready(leaves, s.leaf) for s in p.segments)))
    return tuple(sorted(packs, key=lambda p: (p.segments[0].leaf, p.segments[0].start)))


def _shared(leaves: Sequence[Leaf], rule: PackingRule) -> Iterator[list[Segment]]:
    """The segments of each pack that leaves may share."""
    if isinstance(rule, GroupSmall):
        for run in _small_runs(leaves, rule):
            yield [_whole(leaves, i) for i in run]
        return
    alike: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.travels and not leaf.solid:
            alike.setdefault(_agreement(leaf), []).append(i)
    groups = list(alike.values())
    shares = _shares(leaves, groups, rule.count) if isinstance(rule, NumPacks) else []
    for k, members in enumerate(groups):
        match rule:
            case BytesPerPack():
                yield from _close_before(leaves, members, rule)
            case ReadyOrder():
                in_order = sorted(members, key=lambda i: _ready(leaves, i))
                yield from _tapering(leaves, in_order, rule)
            case NumPacks():
                yield from _cut_evenly([_whole(leaves, i) for i in members], shares[k])


def cut(packs: Sequence[Pack], parts: int) -> tuple[Pack, ...]:
    """Each pack in `parts` packs of near-equal size, in the same order; solid ones stay whole."""
    return tuple(
        dataclasses.replace(pack, segments=tuple(segments))
        for pack in packs
        for segments in (
            [pack.segments] if pack.solid else _cut_evenly(pack.segments, min(parts, pack.size))
        )
    )


def _agreement(leaf: Leaf) -> tuple[np.dtype, tuple[int, ...], Hashable, str]:
    """What two leaves must agree in to share a pack."""
    return leaf.wire, leaf.over, leaf.kind, leaf.format


def _whole(leaves: Sequence[Leaf], i: int) -> Segment:
    return Segment(i, 0, leaves[i].size)


def _ready(leaves: Sequence[Leaf], i: int) -> int:
    # Parameters are mostly listed in the order of use, and a backward pass goes the other way.
    ready = leaves[i].ready
    return -i if ready is None else ready


def _tapering(
    leaves: Sequence[Leaf], members: Sequence[int], rule: ReadyOrder
) -> Iterator[list[Segment]]:
    """The segments of one pack after another; see `ReadyOrder`."""
    # Small leaves wait for the last pack: copied into those between, they would have these copied.
    waiting: set[int] = set()
    for i in members:
        with_it = sum(leaves[k].nbytes for k in waiting) + leaves[i].nbytes
        if leaves[i].nbytes < rule.small and with_it <= rule.last:
            waiting.add(i)
    rest = sum(leaves[i].nbytes for i in members if i not in waiting)
    pack: list[Segment] = []
    room = 0
    for i in members:
        start = leaves[i].size if i in waiting else 0
        while start < leaves[i].size:
            if not pack:
                # XLA places the last collectives beside the optimizer, behind no matrix product, so
                # what is left for the end has to be little (docs/decisions.md).
                room = max(rule.last, min(rule.limit, rest // 4))
            left = leaves[i].size - start
            width = leaves[i].wire.itemsize
            size = min(left, max(room // width, not pack))
            if size < left and rest // 4 >= rule.limit:  # not near the end: leaves stay whole
                size = 0 if pack else left
            if size:
                pack.append(Segment(i, start, size))
            start, room, rest = start + size, room - size * width, rest - size * width
            if not size or room < width:
                yield pack
                pack = []
    last = [_whole(leaves, i) for i in members if i in waiting]
    together = sum(leaves[s.leaf].wire.itemsize * s.size for s in pack + last) <= rule.limit
    yield from filter(None, [pack + last] if together else [pack, last])


def _small_runs(leaves: Sequence[Leaf], rule: GroupSmall) -> Iterator[list[int]]:
    """Indices of the leaves that travel together, one by one where they are large."""

    def run_of(i: int) -> Hashable:
        leaf = leaves[i]
        return leaf.solid, i if leaf.nbytes > rule.max_bytes else None, _agreement(leaf)

    travelling = (i for i, leaf in enumerate(leaves) if leaf.travels)
    for _, run in itertools.groupby(travelling, run_of):
        members = [i for i in run if not leaves[i].solid]
        for start in range(0, len(members), rule.max_group):
            yield members[start : start + rule.max_group]


def _close_before(
    leaves: Sequence[Leaf], members: Sequence[int], rule: BytesPerPack
) -> Iterator[list[Segment]]:
    """Greedy, in order: the pack at hand is closed when the next leaf would pass the limit."""
    # A leaf that travels alone is passed over, so that the small leaves between large ones (a bias
    # after every matrix) still meet.
    pack: list[Segment] = []
    nbytes = 0
    for i in members:
        if leaves[i].nbytes > rule.largest:
            yield [_whole(leaves, i)]
            continue
        if nbytes + leaves[i].nbytes > rule.limit:
            yield pack
            pack, nbytes = [], 0
        pack.append(_whole(leaves, i))
        nbytes += leaves[i].nbytes
    if pack:
        yield pack


def _cut_evenly(segments: Sequence[Segment], count: int) -> Iterator[list[Segment]]:
    """The same elements in `count` runs whose sizes differ by one at most."""
    ends = list(itertools.accumulate(s.size for s in segments))
    each, more = divmod(ends[-1], count)
    bounds = [k * each + min(k, more) for k in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        pack: list[Segment] = []
        for k in range(bisect.bisect(ends, low), bisect.bisect_left(ends, high) + 1):
            end, s = min(ends[k], high), segments[k]
            pack.append(Segment(s.leaf, s.start + s.size - (ends[k] - low), end - low))
            low = end
        yield pack


def _shares(leaves: Sequence[Leaf], groups: Sequence[Sequence[int]], count: int) -> list[int]:
    """How many of `count` packs each group gets: one each, then always to the largest pack."""
    shares = [1] * len(groups)
    sizes = [sum(leaves[i].size for i in members) for members in groups]
    widths = [leaves[members[0]].wire.itemsize for members in groups]
    for _ in range(count - len(groups)):
        each = zip(sizes, widths, shares, strict=True)
        per_pack = [size * width / k if k < size else 0 for size, width, k in each]
        if not any(per_pack):
            break
        shares[per_pack.index(max(per_pack))] += 1
    return shares
