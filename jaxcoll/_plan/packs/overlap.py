"""Packs for an exchange that runs while the backward pass still computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.cost.model import Prices
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._plan.packs.automatic import in_words
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import BytesPerPack, Pack, PackingRule, ReadyOrder
from jaxcoll._plan.world import World

KiB, MiB = 1 << 10, 1 << 20

LAST, LEAST = MiB, 256 * KiB
"""Bytes of the last packs, whose exchange nothing is left to hide: of a large tree as many as
PyTorch's smallest bucket has, of others a `PARTS`-th, but not so few that they are all latency."""

PARTS = 24

MOST = 48
"""Packs of a tree that is not tiny, those at the end apart: no more than XLA was seen to place well
(docs/decisions.md)."""

SLOWED = 1.8
"""Of the time that its bytes would need at full bandwidth, what a pack may take."""

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

_WHERE = {
    "cpu": (
        "overlap: packs keep their order and stay apart as asked, but XLA's CPU runtime waits for "
        "each collective, so that nothing is computed meanwhile"
    ),
    "gpu": "apart: each pack waits for the one before, so that the compiler cannot combine them",
}


def wants_order(options: CommunicationOptions, world: World) -> bool:
    """Whether it matters in which order leaves become ready.

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
    """Whether packs are to travel one by one: as asked, or where the order is known and it pays.

    Exchanges of our own are not chained without being asked. In the backward pass itself the
    order is that of the gradients.
    """
    if options.overlap is not None or not wants_order(options, world) or algorithm != "native":
        return bool(options.overlap)
    known = in_backward or any(leaf.ready is not None for leaf in leaves)
    return known and sum(leaf.nbytes for leaf in leaves if leaf.travels) > 2 * LAST


def rule_for(
    leaves: Sequence[Leaf], asked: int, prices: Prices, in_backward: bool
) -> ReadyOrder | BytesPerPack:
    """The smallest packs that the network carries at 1 / `SLOWED` of its bandwidth, or `asked`."""
    if in_backward:  # whatever is not small travels as soon as it is there, and is not copied
        return BytesPerPack(asked) if asked else BytesPerPack(LAST, LAST)
    total = sum(leaf.nbytes for leaf in leaves if leaf.travels)
    if asked:
        return ReadyOrder(asked, min(asked, LAST), min(asked, ALONE))
    composed = stages("native", 0, prices.sizes)
    whole = prices.of(composed, 1 << 30).bandwidth / (1 << 30)
    limit = LAST
    while limit < total and prices.of(composed, limit).seconds > SLOWED * limit * whole:
        limit += limit // 4
    return ReadyOrder(max(limit, total // MOST), max(LEAST, min(LAST, total // PARTS)), ALONE)


def with_guess(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Leaves of unknown order in that of a usual backward pass: the last one first."""
    if any(leaf.ready is not None for leaf in leaves):
        return tuple(leaves)
    # Parameters are mostly listed in the order of use, and a backward pass goes the other way.
    last = len(leaves) - 1
    return tuple(dataclasses.replace(leaf, ready=last - i) for i, leaf in enumerate(leaves))


def reasons(
    leaves: Sequence[Leaf],
    packs: Sequence[Pack],
    rule: PackingRule,
    world: World,
    in_backward: bool,
) -> Iterator[str]:
    """What was decided, a sentence for each reason of a `Plan`."""
    if in_backward:
        yield f"packs: {in_words(rule)}, each sent when its gradients are there, in no other order"
    elif isinstance(rule, ReadyOrder):
        last = packs[-1].nbytes if packs else 0
        yield (
            f"packs: smaller ones towards the end, the last of {last:,} bytes; leaves of more than "
            f"{rule.limit:,} bytes alone"
        )
        yield (
            "order: that in which the gradients become ready in the backward pass"
            if any(leaf.ready is not None for leaf in leaves)
            else "order: leaves from last to first, for it is not known here when each is ready; "
            "`jc.value_and_grad` and `jc.grad` read it from the backward pass"
        )
    if world.platform == "cpu" or not (in_backward or world.platform == "tpu"):
        yield _WHERE.get(world.platform, "")
    if in_backward or world.platform != "gpu":
        yield by_options(world.platform)


def by_options(platform: str, kind: str = "all-reduce") -> str:
    """The options that keep packs apart, in a sentence."""
    options, in_loops = OPTIONS.get((platform, kind), {}), kind == "loop"
    listed = " and ".join(f"{name}={value}" for name, value in options.items())
    if listed:
        return (
            f"{'overlap' if in_loops else 'apart'}: by the compiler "
            f"option{'s' * (len(options) > 1)} {listed}, which `jc.data_parallel` sets for its own "
            "program; give it to a `jax.jit` of your own (`Plan.compiler_options`)"
        )
    if in_loops:
        return f"overlap: as the compiler for {platform} places it; `jc.inspect` shows what it does"
    return (
        f"apart: no way is known to keep packs of {kind}s apart on {platform}; `jc.inspect` "
        "shows what became of them"
    )
