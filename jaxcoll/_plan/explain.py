"""The sentences of a plan: why its packs and algorithms are what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxcoll._plan.algorithms import DESCRIPTIONS
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.overlap import OPTIONS, ReadyOrder
from jaxcoll._plan.packs.packing import LANES, UNPACKED, Pack, PackingRule
from jaxcoll._plan.planner import CODES, PACKED, asked_algorithm, choose, half_algorithm, is_asked
from jaxcoll._plan.world import World
from jaxcoll._show.units import binary_size, counted
from jaxcoll._wire.format import named


def of_reduction(
    leaves: Sequence[Leaf],
    packs: Sequence[Pack],
    world: World,
    options: CommunicationOptions,
    packing: PackingRule | None,
    apart: bool,
    in_backward: bool,
) -> Iterator[str]:
    """Yield a sentence for each decision about an all-reduce; `apart`: packs travel one by one."""
    if not apart or not isinstance(packing, ReadyOrder):
        yield f"packs: {packing}{_why_packed(options, world, packing, apart)}"
    yield _why_algorithm(asked_algorithm(options, world), options, world)
    yield from _asked(options, world)
    exact = [pack for pack in packs if not pack.solid and not pack.format]
    if not is_asked(options):
        if any("/" in pack.algorithm for pack in packs):
            yield (
                f"two levels: summed within each of the {world.hosts} hosts first, so that less "
                "crosses between them"
            )
        elif any(pack.algorithm != "native" for pack in exact):
            most = binary_size(choose(options, world).limit)
            yield f"packs of at most {most}: by exchanges of our own, which start sooner"
    if apart:
        yield from _of_overlap(leaves, packs, packing, world, in_backward)
    elif any(pack.algorithm == "native" and not pack.is_leaf(leaves) for pack in exact):
        yield "compiled: the compiler may combine packs further; packs are what is asked"
    yield from _of_formats(leaves, packs, options)
    others = [x for x in leaves if x.wire != x.dtype and not x.format]
    widened = {f"{x.dtype.name} as {x.wire.name}" for x in others}
    if widened:
        yield f"dtypes: {', '.join(sorted(widened))}"
    if any(pack.solid for pack in packs) and any(pack.algorithm != "native" for pack in packs):
        yield (
            "leaves that are sharded over another axis: by the compiler's own all-reduce, which "
            "alone leaves them in their shape"
        )
    if any(leaf.gathers for leaf in leaves):
        yield "sparse leaves: their rows and indices, by the compiler's own all-gather, in no pack"


def of_half(
    collective: str,
    packs: Sequence[Pack],
    world: World,
    options: CommunicationOptions,
    in_layers: bool,
    apart: bool,
) -> Iterator[str]:
    """Yield a sentence for each decision about a reduce-scatter or an all-gather."""
    if not in_layers:
        yield (
            f"packs: {len(packs)}, laid out in rows of {LANES}, as many on each of "
            f"{counted(world.replicas, 'replica')}"
        )
    algorithm, carried = asked_algorithm(options, world), half_algorithm(options, world)
    if carried != algorithm:
        yield (
            f"algorithm: {carried}, because Gloo's own reduce-scatter sends more than it has to, "
            "and is reported to go wrong (jax#40830)"
        )
    else:
        why = _why_algorithm(algorithm, options, world)
        yield why.replace("own all-reduce", "own reduce-scatter and all-gather")
    yield from _asked(options, world)
    if in_layers and world.platform == "cpu":
        if any(pack.algorithm == "native" and pack.dtype.name == "bfloat16" for pack in packs):
            yield "dtypes: bfloat16, which the compiler for CPUs widens to float32 on the wire"
    if apart:
        yield by_options(world.platform, "loop" if in_layers else collective.replace("_", "-"))


def by_options(platform: str, kind: str = "all-reduce") -> str:
    """Return the compiler options that keep packs apart, in a sentence."""
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


def _why_packed(
    options: CommunicationOptions, world: World, packing: PackingRule | None, apart: bool
) -> str:
    if apart and not options.bytes_per_pack:
        return ", each sent when its gradients are there, in no other order"
    if packing not in (UNPACKED, PACKED, CODES) or options.bytes_per_pack:
        return ", as asked"
    if packing != UNPACKED and world.over_gloo:
        return ": over Gloo an array takes long to start, and a large one longer to copy"
    if packing != UNPACKED:
        return ", because no compiler combines exchanges of codes"
    if world.over_gloo:
        return ", as asked"
    return (
        ", because inside one process and on accelerators the compiler combines all-reduces itself "
        "and a copy would only cost time"
    )


def _why_algorithm(algorithm: str, options: CommunicationOptions, world: World) -> str:
    carrier = {
        "gpu": "NCCL (RCCL on AMD)",
        "tpu": "the TPU interconnect",
        "cpu": "Gloo" if world.over_gloo else "memory shared by the devices of this process",
    }.get(world.platform, f"the {world.platform} backend")
    if algorithm == "native":
        if options.implementation is CommunicationImplementation.NCCL and world.platform != "gpu":
            return f"algorithm: NCCL was asked for, but {carrier} carries it here"
        return f"algorithm: the compiler's own all-reduce, carried by {carrier}"
    described = ", then, from group to group, ".join(DESCRIPTIONS[x] for x in algorithm.split("/"))
    if options.algorithm in (None, algorithm):
        return f"algorithm: {described}, as asked"
    return (
        f"algorithm: {described}; the compiler's own reduce-scatter was asked for within, but "
        "Gloo's sends more than it has to, and is reported to go wrong (jax#40830)"
    )


def _asked(options: CommunicationOptions, world: World) -> Iterator[str]:
    if options.reproducible:
        yield (
            "order: every element is summed in pairs of replicas, then pairs of pairs, so that its "
            "bits are the same however it is packed, placed and carried"
        )
    if options.shards and (owners := choose(options, world).owners):
        yield f"shards: {owners} for each pack, each with an owner, as asked"
    elif options.shards:
        yield f"shards: each pack is cut in {options.shards}, reduced side by side, as asked"


def _of_overlap(
    leaves: Sequence[Leaf],
    packs: Sequence[Pack],
    rule: PackingRule | None,
    world: World,
    in_backward: bool,
) -> Iterator[str]:
    if isinstance(rule, ReadyOrder):
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
    if world.platform == "cpu":
        yield (
            "overlap: packs keep their order and stay apart as asked, but XLA's CPU runtime waits "
            "for each collective, so that nothing is computed meanwhile"
        )
    if world.platform == "gpu" and not in_backward:
        yield "apart: each pack waits for the one before, so that the compiler cannot combine them"
    else:
        yield by_options(world.platform)


def _of_formats(
    leaves: Sequence[Leaf], packs: Sequence[Pack], options: CommunicationOptions
) -> Iterator[str]:
    """Yield what travels in a wire format, and what does not although it was asked."""
    for format in dict.fromkeys(x.format for x in leaves if x.format):
        count = sum(x.format == format for x in leaves)
        blocks = f" in blocks of {format.block}" if format.block > 1 else ""
        between = any("/" in pack.algorithm and pack.format == format for pack in packs)
        why = "as asked" if options.compression else "because XLA would widen them for Gloo"
        why = "which is faster over Gloo" if options.compression == "auto" else why
        yield (
            f"format: {format}{blocks} for {counted(count, 'leaf', 'leaves')}, {why}: codes go to "
            "the owner of each shard, who adds them in float32 and sends the sum as codes"
            + ", between groups only"
            * between
        )
    exact = [x for x in leaves if x.travels and not x.format]
    if named(options.compression) and exact:
        yield (
            f"exactly: {counted(len(exact), 'leaf', 'leaves')}, under a block of "
            f"{options.compression} or of types that it does not code"
        )
