"""Packs: the elements of leaves that travel together, chosen from shapes alone.

Packs are frozen, hashable values made of segments (runs of elements of one leaf). So unpacking
needs no state: reading the packs in order gives back every leaf, bit for bit.
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

from jaxcoll._compression.format import WireFormat
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.world import World
from jaxcoll._show.units import binary_size

LANES = 128
"""Elements in a row. TPUs store rows of 128, and compile no reduce-scatter of a flat buffer."""


def pad_size(size: int, replicas: int, lanes: int = LANES) -> int:
    """Return `size` plus the zeros that give each replica equally many rows of `lanes` elements.

    Examples:
      >>> pad_size(1000, 4), pad_size(1000, 4, 1)
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
    """A rule that groups leaves into packs: a hashable value; `str` describes it."""

    @abc.abstractmethod
    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield the segments of each pack; only leaves that `alike` groups may share one."""

    def sort_key(self, leaves: Sequence[Leaf], segments: Sequence[Segment]) -> Any:
        """Return the key that packs are sorted by: their first leaf."""
        return segments[0].leaf, segments[0].start


@dataclasses.dataclass(frozen=True)
class BytesPerPack(PackingRule):
    """Close a pack before it would exceed `limit` bytes; a larger leaf travels alone.

    With `alone`, leaves of more than that many bytes travel alone too: copying them in and out can
    cost more than another array.

    Examples:
      >>> str(BytesPerPack(16 << 20, alone=2 << 20))
      'leaves over 2 MiB alone, others in packs of at most 16 MiB'
    """

    limit: int
    alone: int | None = None

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield packs, greedily and in order."""
        # A leaf that travels alone does not close the pack, so that the small leaves between large
        # ones (a bias after every matrix) still share one.
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

    dtype: np.dtype  # the type it is summed in, and travels in without a format
    # Sizes of the reduction's axes, outer first; 1 along those it is not summed over
    over: tuple[int, ...]
    kind: Hashable  # the `kind` that all of its leaves share
    segments: tuple[Segment, ...]  # what it carries
    solid: bool = False  # it is one whole leaf, which must keep its shape
    algorithm: str = "native"  # canonical name of what sums it; "inner/outer" for two levels
    format: WireFormat | None = None  # its wire format; of two levels, that of the outer one

    @functools.cached_property
    def size(self) -> int:
        """Elements on one replica."""
        return sum(map(_SIZE, self.segments))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each segment, padded to whole blocks in a wire format."""
        padded = self.format.padded if self.format else int
        return tuple(padded(s.size) for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes on one replica."""
        return self.size * self.dtype.itemsize

    @property
    def shown_type(self) -> str:
        """The type it is summed in, and its wire format, as tables show them."""
        return f"{self.dtype.name} as {self.format}" if self.format else self.dtype.name

    def is_leaf(self, leaves: Sequence[Any]) -> bool:
        """Return whether it is one whole leaf, which needs no copy."""
        return len(self.segments) == 1 and self.size == leaves[self.segments[0].leaf].size


def plan_packs(
    leaves: Sequence[Leaf],
    rule: PackingRule,
    algorithm: Callable[[Pack], str] = lambda pack: "native",
) -> tuple[Pack, ...]:
    """Assign every element of every leaf to exactly one pack, and an algorithm to each pack.

    Guarantee: a pack holds one dtype and one kind, summed over the same axes; leaves keep their
    order inside a pack; leaves that do not travel are in none. The rule sorts the packs.
    """
    alone = [
        i for i, leaf in enumerate(leaves) if leaf.travels and (leaf.solid or rule == UNPACKED)
    ]
    runs = [[Segment(i, 0, leaves[i].size)] for i in alone]
    if rule != UNPACKED:
        runs += rule.runs(leaves)
        runs.sort(key=lambda run: rule.sort_key(leaves, run))
    packs = []
    for run in runs:
        leaf = leaves[run[0].leaf]
        pack = Pack(leaf.wire, leaf.over, leaf.kind, tuple(run), leaf.solid, format=leaf.format)
        name = algorithm(pack)
        packs.append(pack if name == "native" else dataclasses.replace(pack, algorithm=name))
    return tuple(packs)


def alike(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Return groups of indices of leaves that may share a pack, in order within each group."""
    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.travels and not leaf.solid:
            groups.setdefault((leaf.wire, leaf.over, leaf.kind, leaf.format), []).append(i)
    return list(groups.values())


def whole(leaves: Sequence[Leaf], i: int) -> Segment:
    """Return the segment that is all of leaf number `i`."""
    return Segment(i, 0, leaves[i].size)


def cut(packs: Sequence[Pack], parts: int) -> tuple[Pack, ...]:
    """Cut each pack into `parts` of near-equal size, in the same order; solid ones stay whole."""
    return tuple(
        dataclasses.replace(pack, segments=tuple(segments))
        for pack in packs
        for segments in (
            [pack.segments] if pack.solid else cut_evenly(pack.segments, min(parts, pack.size))
        )
    )


def cut_evenly(segments: Sequence[Segment], count: int) -> Iterator[list[Segment]]:
    """Yield the same elements in `count` runs; their sizes differ by at most one."""
    ends = list(itertools.accumulate(s.size for s in segments))
    size, remainder = divmod(ends[-1], count)
    bounds = [k * size + min(k, remainder) for k in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        pack: list[Segment] = []
        for k in range(bisect.bisect(ends, low), bisect.bisect_left(ends, high) + 1):
            end, s = min(ends[k], high), segments[k]
            pack.append(Segment(s.leaf, s.start + s.size - (ends[k] - low), end - low))
            low = end
        yield pack


KiB, MiB = 1 << 10, 1 << 20

FULL, FULL_BETWEEN_HOSTS = 18 * MiB, 36 * MiB
"""Bytes of a pack that takes about 1.8 times as long as its bytes would need at full bandwidth, on
one host of H100s and on several (docs/overlap.md): smaller packs waste the network, larger ones
hide less."""

LAST, LEAST = MiB, 256 * KiB
"""Most and fewest bytes of the last packs, with no computation left to hide them. A large tree has
`LAST`, as PyTorch's smallest bucket; a smaller tree has a `PARTS`-th of its bytes, but at least
`LEAST`, below which a pack is all latency."""

PARTS = 24

MOST_PACKS = 48
"""Most packs of a tree, apart from the small ones at the end: as many as XLA was seen to schedule
well (docs/decisions.md)."""

SMALL = 64 * KiB
"""Bytes below which a leaf is too small to be worth its place in the order."""

_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""Number of collectives that XLA's GPU scheduler may run at once. By default it plans for one, so
in a loop, which is scheduled separately, the collectives of an iteration wait for each other."""

KEEP_APART: dict[tuple[str, str], dict[str, Any]] = {
    ("cpu", "all-reduce"): {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"},
    # Chained packs cannot be combined anyway; these options are for a loop, which has no chain.
    ("gpu", "all-reduce"): {"xla_gpu_all_reduce_combine_threshold_bytes": 1, _AT_ONCE: 8},
    ("gpu", "loop"): {_AT_ONCE: 8},
    # XLA counts bytes of one device's shard here, so a threshold chosen by pack size would not do.
    ("gpu", "reduce-scatter"): {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1},
    ("gpu", "all-gather"): {"xla_gpu_all_gather_combine_threshold_bytes": 1},
    # Packs are larger than this; metrics are smaller, so they still travel together.
    ("tpu", "all-reduce"): {"xla_jf_crs_combiner_threshold_in_bytes": SMALL},
}
"""Compiler options that keep packs apart, by platform and collective. Those of the kind "loop" let
the gather and the scatter of different layers run at once in one iteration."""


@dataclasses.dataclass(frozen=True)
class ReadyOrder(PackingRule):
    """Packs in the order in which leaves become ready, small ones at the end.

    A pack holds at most `limit` bytes, and at most a quarter of the bytes that are still to be
    packed; but it may always hold `last` bytes. So little is left to send when the computation
    ends. Leaves of more than `limit` bytes travel alone and whole; leaves are cut only towards the
    end. Leaves of less than `small` bytes, at most `last` bytes of them, wait for the last pack, so
    that large leaves between them need no copy.
    """

    limit: int
    last: int
    small: int

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield packs of leaves that are alike, one after another."""
        for members in alike(leaves):
            yield from self._tapering(leaves, sorted(members, key=lambda i: _ready(leaves, i)))

    def sort_key(self, leaves: Sequence[Leaf], segments: Sequence[Segment]) -> Any:
        """Return when the last of the leaves is ready."""
        return max(_ready(leaves, s.leaf) for s in segments)

    def _tapering(self, leaves: Sequence[Leaf], members: Sequence[int]) -> Iterator[list[Segment]]:
        # In an earlier pack, a small leaf would force a copy of the large leaves beside it.
        waiting: set[int] = set()
        for i in members:
            nbytes_waiting = sum(leaves[k].nbytes for k in waiting) + leaves[i].nbytes
            if leaves[i].nbytes < self.small and nbytes_waiting <= self.last:
                waiting.add(i)
        rest = sum(leaves[i].nbytes for i in members if i not in waiting)
        pack: list[Segment] = []
        room = 0
        for i in members:
            start = leaves[i].size if i in waiting else 0
            while start < leaves[i].size:
                if not pack:
                    # XLA runs the last collectives beside the optimizer, where no matrix product
                    # hides them, so little must be left for the end (docs/decisions.md).
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
    # Parameters are mostly listed in the order of use, and a backward pass runs the other way.
    ready = leaves[i].ready
    return -i if ready is None else ready


def packing_in_order(
    leaves: Sequence[Leaf], limit: int, world: World, in_backward: bool
) -> ReadyOrder | BytesPerPack:
    """Return the rule for packs of at most `limit` bytes; 0: of the size that suits the world."""
    if in_backward:  # leaves that are not small travel as soon as they are ready, without a copy
        return BytesPerPack(limit) if limit else BytesPerPack(LAST, LAST)
    if limit:
        return ReadyOrder(limit, min(limit, LAST), min(limit, SMALL))
    total = sum(leaf.nbytes for leaf in leaves if leaf.travels)
    full = FULL if world.hosts == 1 else FULL_BETWEEN_HOSTS
    return ReadyOrder(max(full, total // MOST_PACKS), max(LEAST, min(LAST, total // PARTS)), SMALL)
