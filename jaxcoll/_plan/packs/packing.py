"""From shapes to packs, and nothing else: which elements travel together.

A plan is a frozen, hashable value. It is made of segments (runs of elements of one leaf), so
its inverse needs no state: reading the packs in order gives back every leaf, to the bit.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.world import World
from jaxcoll._show.units import binary_size
from jaxcoll._wire.format import WireFormat

LANES = 128
"""Elements of a row. TPUs hold rows of 128; of a flat buffer they make no reduce-scatter."""


def padded(size: int, replicas: int, lanes: int = LANES) -> int:
    """Elements of a whole pack of `size` with the zeros behind it, in rows of `lanes`.

    Examples:
      >>> padded(1000, 4), padded(1000, 4, 1)
      (1024, 1000)
    """
    return -(-size // (replicas * lanes)) * replicas * lanes


class Segment(NamedTuple):
    """Elements `[start, start + size)` of the flattened leaf number `leaf`."""

    leaf: int
    start: int
    size: int


_SIZE = operator.attrgetter("size")


class PackingRule(abc.ABC):
    """A rule by which leaves travel together: a hashable value, whose `str` says it in words."""

    @abc.abstractmethod
    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield the segments of each pack that leaves may share; `alike` says which may."""

    def place(self, leaves: Sequence[Leaf], segments: Sequence[Segment]) -> Any:
        """Return what packs are sorted by: the first leaf that they carry."""
        return segments[0].leaf, segments[0].start


@dataclasses.dataclass(frozen=True)
class BytesPerPack(PackingRule):
    """Close a pack before it would exceed `limit` bytes; a larger leaf travels alone.

    With `alone`, leaves of more than so many bytes do: a copy in and out can cost more than an
    array of their own.

    Examples:
      >>> str(BytesPerPack(16 << 20, alone=2 << 20))
      'leaves over 2 MiB alone, others in packs of at most 16 MiB'
    """

    limit: int
    alone: int | None = None

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield packs, greedily and in order."""
        # A leaf that travels alone is passed over, so that the small leaves between large ones (a
        # bias after every matrix) still meet.
        largest = self.limit if self.alone is None else min(self.limit, self.alone)
        for members in alike(leaves):
            pack: list[Segment] = []
            nbytes = 0
            for i in members:
                if leaves[i].nbytes > largest:
                    yield [whole(leaves, i)]
                    continue
                if nbytes + leaves[i].nbytes > self.limit:
                    yield pack
                    pack, nbytes = [], 0
                pack.append(whole(leaves, i))
                nbytes += leaves[i].nbytes
            if pack:
                yield pack

    def __str__(self) -> str:
        if not self.limit:
            return "every leaf alone"
        if self.limit >= 1 << 50:
            return "one for each type"
        most = f"at most {binary_size(self.limit)}"
        if self.alone is None:
            return most
        return f"leaves over {binary_size(self.alone)} alone, others in packs of {most}"


UNPACKED = BytesPerPack(0)
"""Every leaf travels alone, in its own shape."""


@dataclasses.dataclass(frozen=True)
class Pack:
    """One array that travels: segments of one dtype, in order."""

    dtype: np.dtype  # the type it is summed in, and travels in where no format is named
    # Sizes of the reduction's axes, outer first; 1 along those it is not summed over
    over: tuple[int, ...]
    kind: Hashable  # what its leaves agree in beside
    segments: tuple[Segment, ...]  # what it carries
    solid: bool = False  # it is one whole leaf, which must keep its shape
    algorithm: str = "native"  # what sums it, a canonical name; "inner/outer" for one of two parts
    format: WireFormat | None = None  # what it travels in; of two parts the outer one does

    @functools.cached_property
    def size(self) -> int:
        """Elements on one replica."""
        return sum(map(_SIZE, self.segments))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements that each segment takes: in a wire format those of its last block, too."""
        padded = self.format.padded if self.format else int
        return tuple(padded(s.size) for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes on one replica."""
        return self.size * self.dtype.itemsize

    @property
    def shown_type(self) -> str:
        """The type it is summed in, and the format it travels in, as tables have it."""
        return f"{self.dtype.name} as {self.format}" if self.format else self.dtype.name

    def is_leaf(self, leaves: Sequence[Any]) -> bool:
        """Return whether it is one whole leaf, which is not copied."""
        return len(self.segments) == 1 and self.size == leaves[self.segments[0].leaf].size


def plan_packs(
    leaves: Sequence[Leaf],
    rule: PackingRule,
    algorithm: Callable[[Pack], str] = lambda pack: "native",
) -> tuple[Pack, ...]:
    """Assign every element of every leaf to exactly one pack, and to each its algorithm.

    Guarantee: a pack holds one dtype and one kind, summed over the same axes; leaves keep their
    order inside a pack; leaves that do not travel are in none. Packs are in the order of the rule.
    """
    alone = [
        i for i, leaf in enumerate(leaves) if leaf.travels and (leaf.solid or rule == UNPACKED)
    ]
    runs = [[Segment(i, 0, leaves[i].size)] for i in alone]
    if rule != UNPACKED:
        runs += rule.runs(leaves)
        runs.sort(key=lambda run: rule.place(leaves, run))
    packs = []
    for run in runs:
        leaf = leaves[run[0].leaf]
        pack = Pack(leaf.wire, leaf.over, leaf.kind, tuple(run), leaf.solid, format=leaf.format)
        name = algorithm(pack)
        packs.append(pack if name == "native" else dataclasses.replace(pack, algorithm=name))
    return tuple(packs)


def alike(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Return the indices of leaves that may share a pack, those of each agreement in order."""
    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.travels and not leaf.solid:
            groups.setdefault((leaf.wire, leaf.over, leaf.kind, leaf.format), []).append(i)
    return list(groups.values())


def whole(leaves: Sequence[Leaf], i: int) -> Segment:
    """Return all of leaf number `i`."""
    return Segment(i, 0, leaves[i].size)


def cut(packs: Sequence[Pack], parts: int) -> tuple[Pack, ...]:
    """Return each pack in `parts` of near-equal size, in the same order; solid ones stay whole."""
    return tuple(
        dataclasses.replace(pack, segments=tuple(segments))
        for pack in packs
        for segments in (
            [pack.segments] if pack.solid else cut_evenly(pack.segments, min(parts, pack.size))
        )
    )


def cut_evenly(segments: Sequence[Segment], count: int) -> Iterator[list[Segment]]:
    """Yield the same elements in `count` runs whose sizes differ by one at most."""
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


KiB, MiB = 1 << 10, 1 << 20

FULL, FULL_BETWEEN_HOSTS = 18 * MiB, 36 * MiB
"""Bytes of a pack that takes about 1.8 times what its bytes would need at full bandwidth, on one
host of H100s and on several (docs/overlap.md): smaller ones waste the network, larger ones hide
less."""

LAST, LEAST = MiB, 256 * KiB
"""Bytes of the last packs, whose exchange nothing is left to hide: of a large tree as many as
PyTorch's smallest bucket has, of others a `PARTS`-th, but not so few that they are all latency."""

PARTS = 24

MOST = 48
"""Packs of a tree that is not tiny, those at the end apart: no more than XLA was seen to place well
(docs/decisions.md)."""

ALONE = 64 * KiB
"""Bytes of leaves that are too small to be worth their place in the order."""

_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""Collectives that XLA's scheduler for GPUs may have under way. It plans for one at a time, so that
in a loop, which is scheduled as a program of its own, those of one turn stand behind each other."""

KEEP_APART: dict[tuple[str, str], dict[str, Any]] = {
    ("cpu", "all-reduce"): {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"},
    # Where packs are chained nothing is left to combine; these are for a loop's, which are not.
    ("gpu", "all-reduce"): {"xla_gpu_all_reduce_combine_threshold_bytes": 1, _AT_ONCE: 8},
    ("gpu", "loop"): {_AT_ONCE: 8},
    # Counted in bytes of the shard that a device ends with, so that no size of a pack would do.
    ("gpu", "reduce-scatter"): {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1},
    ("gpu", "all-gather"): {"xla_gpu_all_gather_combine_threshold_bytes": 1},
    # Packs are larger than this, metrics are not, which then still travel together.
    ("tpu", "all-reduce"): {"xla_jf_crs_combiner_threshold_in_bytes": ALONE},
}
"""Compiler options that keep packs apart, by platform and collective; of the kind "loop" those
that let a gather and a scatter of other layers be under way in one turn."""


@dataclasses.dataclass(frozen=True)
class ReadyOrder(PackingRule):
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

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield packs of leaves that are alike, one after another."""
        for members in alike(leaves):
            yield from self._tapering(leaves, sorted(members, key=lambda i: _ready(leaves, i)))

    def place(self, leaves: Sequence[Leaf], segments: Sequence[Segment]) -> Any:
        """Return when the last of the leaves is ready."""
        return max(_ready(leaves, s.leaf) for s in segments)

    def _tapering(self, leaves: Sequence[Leaf], members: Sequence[int]) -> Iterator[list[Segment]]:
        # Small leaves wait for the last pack: copied into those between, they would have these
        # copied.
        waiting: set[int] = set()
        for i in members:
            with_it = sum(leaves[k].nbytes for k in waiting) + leaves[i].nbytes
            if leaves[i].nbytes < self.small and with_it <= self.last:
                waiting.add(i)
        rest = sum(leaves[i].nbytes for i in members if i not in waiting)
        pack: list[Segment] = []
        room = 0
        for i in members:
            start = leaves[i].size if i in waiting else 0
            while start < leaves[i].size:
                if not pack:
                    # XLA places the last collectives beside the optimizer, behind no matrix
                    # product, so what is left for the end has to be little (docs/decisions.md).
                    room = max(self.last, min(self.limit, rest // 4))
                left = leaves[i].size - start
                width = leaves[i].wire.itemsize
                size = min(left, max(room // width, not pack))
                if size < left and rest // 4 >= self.limit:  # not near the end: leaves stay whole
                    size = 0 if pack else left
                if size:
                    pack.append(Segment(i, start, size))
                start, room, rest = start + size, room - size * width, rest - size * width
                if not size or room < width:
                    yield pack
                    pack = []
        last = [whole(leaves, i) for i in members if i in waiting]
        together = sum(leaves[s.leaf].wire.itemsize * s.size for s in pack + last) <= self.limit
        yield from filter(None, [pack + last] if together else [pack, last])

    def __str__(self) -> str:
        return "in the order in which leaves become ready"


def _ready(leaves: Sequence[Leaf], i: int) -> int:
    # Parameters are mostly listed in the order of use, and a backward pass goes the other way.
    ready = leaves[i].ready
    return -i if ready is None else ready


def packing_in_order(
    leaves: Sequence[Leaf], limit: int, world: World, in_backward: bool
) -> ReadyOrder | BytesPerPack:
    """Return packs of at most `limit` bytes, or where that is 0 of what suits the world."""
    if in_backward:  # whatever is not small travels as soon as it is there, and is not copied
        return BytesPerPack(limit) if limit else BytesPerPack(LAST, LAST)
    if limit:
        return ReadyOrder(limit, min(limit, LAST), min(limit, ALONE))
    total = sum(leaf.nbytes for leaf in leaves if leaf.travels)
    full = FULL if world.hosts == 1 else FULL_BETWEEN_HOSTS
    return ReadyOrder(max(full, total // MOST), max(LEAST, min(LAST, total // PARTS)), ALONE)
