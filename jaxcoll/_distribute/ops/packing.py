"""The packing rules of TensorFlow's cross-device ops."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import PackingRule, Segment, alike, cut_evenly, whole
from jaxcoll._show.units import binary_size


@dataclasses.dataclass(frozen=True)
class NumPacks(PackingRule):
    """`count` packs of near-equal bytes; leaves are cut where a pack ends."""

    count: int

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield one pack for each group of leaves that are alike, and the rest to the largest."""
        groups = alike(leaves)
        sizes = [sum(leaves[i].size for i in members) for members in groups]
        widths = [leaves[members[0]].wire.itemsize for members in groups]
        shares = [1] * len(groups)
        for _ in range(self.count - len(groups)):
            packs = zip(sizes, widths, shares, strict=True)
            nbytes = [size * width / k if k < size else 0 for size, width, k in packs]
            if not any(nbytes):
                break
            shares[nbytes.index(max(nbytes))] += 1
        for members, share in zip(groups, shares, strict=True):
            yield from cut_evenly([whole(leaves, i) for i in members], share)

    def __str__(self) -> str:
        return f"{self.count} of near-equal bytes"


@dataclasses.dataclass(frozen=True)
class GroupSmall(PackingRule):
    """Runs of neighbouring leaves of at most `max_bytes` each travel in groups; others alone.

    A run is of one dtype and kind, and a larger leaf ends it; a group has at most `max_group`
    leaves.
    """

    max_bytes: int
    max_group: int

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield groups of neighbours."""
        group_of = {i: k for k, members in enumerate(alike(leaves)) for i in members}

        def run_of(i: int) -> Hashable:
            return group_of.get(i), i if leaves[i].nbytes > self.max_bytes else None

        travelling = (i for i, leaf in enumerate(leaves) if leaf.travels)
        for _, run in itertools.groupby(travelling, run_of):
            members = [i for i in run if i in group_of]
            for start in range(0, len(members), self.max_group):
                yield [whole(leaves, i) for i in members[start : start + self.max_group]]

    def __str__(self) -> str:
        most = binary_size(self.max_bytes)
        return f"neighbours of at most {most}, up to {self.max_group} together"
