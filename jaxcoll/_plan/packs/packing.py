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
