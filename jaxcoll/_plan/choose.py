"""What the options decide, and what they leave to the cost model."""

from __future__ import annotations

import dataclasses

from jaxcoll._plan.algorithms import (
    DESCRIPTIONS,
    IN_TREE_ORDER,
    check_fits,
    check_in_tree_order,
    exchange_within,
    owns_shards,
)
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions
from jaxcoll._plan.packs.packing import BytesPerPack, PackingRule
from jaxcoll._plan.wire_formats import named
from jaxcoll._plan.world import World


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the options ask for, and why it is that, in words a plan can show."""

    # Which leaves travel together; None: whatever is predicted to be fastest
    packing: PackingRule | None
    algorithm: str  # a canonical name
    fixed: bool  # it was asked for; otherwise another may stand in for it where that is faster
    parts: int  # how many arrays each pack is then cut in
    owners: int  # shards of an outermost shuffle; 0: one for each replica
    reasons: tuple[str, ...]  # one sentence for each decision


def choose(
    options: CommunicationOptions, world: World, packing: PackingRule | None = None
) -> Choice:
    """What is done for what was asked; a `packing` from elsewhere (`num_packs`) stands."""
    if packing is not None:
        why_packing = "packs: as asked of the cross-device ops"
    elif options.bytes_per_pack:
        packing = BytesPerPack(options.bytes_per_pack)
        why_packing = f"packs: at most {options.bytes_per_pack} bytes, as asked"
    else:
        why_packing = ""
    asked = options.algorithm or _implied(options, world)
    if named(options.compression) is not None:
        _check_carries_codes(asked, options)
    check_fits(asked, options.shards, world)
    algorithm, why_algorithm = _carried(asked, options, world)
    # What was asked for stays, even where the cost model knows a faster way.
    fixed = bool(options.algorithm or options.reproducible or options.shards) or (
        options.implementation is not CommunicationImplementation.AUTO
    )
    reasons = tuple(filter(None, (why_packing, why_algorithm)))
    if options.reproducible:
        check_in_tree_order(asked, options.shards, world)
        reasons += (
            "order: every element is summed in pairs of replicas, then pairs of pairs, so that its "
            "bits are the same however it is packed, placed and carried",
        )
    parts, owners = 1, 0
    if options.shards and owns_shards(algorithm):
        owners = options.shards
        reasons += (f"shards: {owners} for each pack, each with an owner, as asked",)
    elif options.shards:
        parts = options.shards
        reasons += (f"shards: each pack is cut in {parts}, reduced side by side, as asked",)
    return Choice(packing, algorithm, fixed, parts, owners, reasons)


def _check_carries_codes(asked: str, options: CommunicationOptions) -> None:
    """Refuse what codes cannot be summed by, or what cannot hold of them."""
    format, outermost = str(options.compression), asked.split("/")[-1]
    asked_for = options.algorithm or options.implementation is CommunicationImplementation.RING
    if asked_for and outermost not in ("native", "shuffle"):
        raise ValueError(
            f"`compression` {format!r} does not go with {asked!r}: {DESCRIPTIONS[outermost]} adds "
            "numbers on the way, and each of its steps would round once more. Leave `algorithm` "
            "and `implementation` unset, or ask for 'shuffle', or 'inner/shuffle' over two axes."
        )
    if options.shards:
        raise ValueError(
            f"`compression` {format!r} has one shard for each replica, and `shards="
            f"{options.shards}` asks for another number: leave `shards` unset."
        )
    if options.reproducible and "/" in asked:
        raise ValueError(
            f"`reproducible` asks for bits that do not depend on the algorithm, and {asked!r} with "
            f"`compression` {format!r} codes sums of groups, which 'shuffle' does not: leave "
            "`algorithm` unset."
        )


def _implied(options: CommunicationOptions, world: World) -> str:
    """The algorithm where none is named."""
    if options.implementation is CommunicationImplementation.RING:
        return "ring"
    if options.implementation is CommunicationImplementation.NCCL or not options.reproducible:
        return "native"
    return next(name for name, law in IN_TREE_ORDER.items() if law(world.replicas))


def _carried(asked: str, options: CommunicationOptions, world: World) -> tuple[str, str]:
    """The name of the algorithm that does what was asked, and why it is that one."""
    carrier = {
        "gpu": "NCCL (RCCL on AMD)",
        "tpu": "the TPU interconnect",
        "cpu": "Gloo" if world.over_gloo else "memory shared by the devices of this process",
    }.get(world.platform, f"the {world.platform} backend")
    if asked == "native":
        if options.implementation is CommunicationImplementation.NCCL and world.platform != "gpu":
            return asked, f"algorithm: NCCL was asked for, but {carrier} carries it here"
        return asked, f"algorithm: the compiler's own all-reduce, carried by {carrier}"
    # Gloo has a reduce-scatter, but not a good one, so an exchange of ours does that part.
    *inner, outermost = asked.split("/")
    if "native" not in inner or carrier != "Gloo":
        return asked, f"algorithm: {_described(asked)}, as asked"
    within = zip(inner, reversed(world.sizes), strict=False)
    ours = (exchange_within(n, world) if name == "native" else name for name, n in within)
    spared = "/".join([*ours, outermost])
    return spared, (
        f"algorithm: {_described(spared)}; the compiler's own reduce-scatter was asked for "
        "within, but Gloo's sends more than it has to, and is reported to go wrong (jax#40830)"
    )


def _described(algorithm: str) -> str:
    """An algorithm in words, from inner to outer."""
    return ", then, from group to group, ".join(DESCRIPTIONS[name] for name in algorithm.split("/"))
