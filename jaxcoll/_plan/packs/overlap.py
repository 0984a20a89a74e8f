"""Packs for an exchange that runs while the backward pass still computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import BytesPerPack, ReadyOrder
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
"""What keeps packs apart in a program that is compiled for a platform, by their collective; of the
kind "loop" what lets a gather and a scatter of other layers be under way in one turn."""


def wants_order(options: CommunicationOptions, world: World) -> bool:
    """Return whether it matters in which order leaves become ready.

    Without being asked on GPUs, whose compiler starts collectives early and computes meanwhile;
    not on CPUs, which wait for each, nor on TPUs, where most generations do.
    """
    if options.overlap is None:
        return world.platform == "gpu" and world.replicas > 1
    return options.overlap


def is_wanted(
    options: CommunicationOptions,
    world: World,
    leaves: Sequence[Leaf],
    algorithm: str,
    in_backward: bool,
) -> bool:
    """Return whether packs travel one by one: as asked, or where the order is known and it pays.

    Exchanges of our own are not chained without being asked. In the backward pass itself the
    order is that of the gradients.
    """
    if options.overlap is not None:
        return options.overlap
    if world.platform != "gpu" or world.replicas == 1 or algorithm != "native":
        return False
    is_known = in_backward or any(leaf.ready is not None for leaf in leaves)
    return is_known and sum(leaf.nbytes for leaf in leaves if leaf.travels) > 2 * LAST


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
