"""Packs for an exchange that runs while the backward pass still computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import BytesPerPack, PackingRule, Segment, alike, whole
from jaxcoll._plan.world import World

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

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
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


def packing_for(
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
