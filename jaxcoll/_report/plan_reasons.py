"""The reasons of a plan, a sentence for each decision."""

from __future__ import annotations

from collections.abc import Iterator

from jaxcoll._compression.format import find_format
from jaxcoll._plan import choose as planner
from jaxcoll._plan.algorithms import DESCRIPTIONS
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions
from jaxcoll._plan.packs.packing import KEEP_APART, LANES, UNPACKED, ReadyOrder
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._plan.world import World
from jaxcoll._show.units import binary_size, pluralize

GLOO_REDUCE_SCATTER = (
    "Gloo's own reduce-scatter sends more than necessary and has a reported bug (jax#40830)"
)


def explain(plan: CollectivePlan) -> tuple[str, ...]:
    """Say each decision in a sentence, and requests that were not followed."""
    if plan.collective == "all_reduce":
        return (*_explain_reduction(plan), *plan.notes)
    return (*plan.notes, *_explain_half(plan))


def _explain_reduction(plan: CollectivePlan) -> Iterator[str]:
    leaves, packs, world, options = plan.leaves, plan.packs, plan.world, plan.options
    # Packs in the order of readiness are explained below, with what they overlap.
    if not plan.overlap or not isinstance(plan.packing, ReadyOrder):
        yield f"packs: {plan.packing}{_why_packed(plan)}"
    algorithm = planner.resolve_algorithm(options, world)
    others = [pack.algorithm for pack in packs if pack.algorithm != algorithm]
    names = ", ".join(sorted({*others}))
    if others and len(others) == len(packs) and not planner.fixes_algorithm(options):
        yield f"algorithm: {names}"
    else:
        exceptions = f"; {names} for {len(others)} of {pluralize(len(packs), 'pack')}"
        yield _why_algorithm(algorithm, options, world) + exceptions * bool(others)
    yield from _explain_options(options, world)
    exact = [pack for pack in packs if not pack.solid and not pack.format]
    if not planner.fixes_algorithm(options):
        if any("/" in pack.algorithm for pack in packs):
            yield (
                f"two levels: summed within each of the {world.hosts} hosts first, so that fewer "
                "bytes cross between them"
            )
        elif any(pack.algorithm != "native" for pack in exact):
            most = binary_size(planner.choose(options, world).limit)
            yield f"packs of at most {most}: by jaxcoll's own exchanges, which start sooner"
    if plan.overlap:
        yield from _explain_overlap(plan)
    elif any(pack.algorithm == "native" and not pack.is_leaf(leaves) for pack in exact):
        yield "compiled: the compiler may combine these packs further"
    yield from _explain_formats(plan)
    uncoded = [x for x in leaves if x.wire != x.dtype and not x.format]
    widened = {f"{x.dtype.name} as {x.wire.name}" for x in uncoded}
    if widened:
        yield f"dtypes: {', '.join(sorted(widened))}"
    if any(pack.solid for pack in packs) and any(pack.algorithm != "native" for pack in packs):
        yield (
            "leaves that are sharded over another axis: by the compiler's own all-reduce, the only "
            "one that keeps their shape"
        )
    if any(leaf.gathers for leaf in leaves):
        yield "sparse leaves: rows and indices by the compiler's own all-gather, outside the packs"


def _explain_half(plan: CollectivePlan) -> Iterator[str]:
    """Yield a sentence for each decision about a reduce-scatter or an all-gather."""
    packs, world, options, in_layers = plan.packs, plan.world, plan.options, plan.lanes == 1
    if not in_layers:
        yield (
            f"packs: {len(packs)}, laid out in rows of {LANES}, equally many on each of "
            f"{pluralize(world.replicas, 'replica')}"
        )
    algorithm = planner.half_algorithm(options, world)
    if algorithm != planner.resolve_algorithm(options, world):
        yield f"algorithm: {algorithm}, because {GLOO_REDUCE_SCATTER}"
    else:
        why = _why_algorithm(algorithm, options, world)
        yield why.replace("own all-reduce", "own reduce-scatter and all-gather")
    yield from _explain_options(options, world)
    if in_layers and world.platform == "cpu":
        if any(pack.algorithm == "native" and pack.dtype.name == "bfloat16" for pack in packs):
            yield "dtypes: bfloat16, which XLA's CPU compiler widens to float32 on the wire"
    if plan.overlap:
        kind = "loop" if in_layers else plan.collective.replace("_", "-")
        yield _explain_apart(world.platform, kind)


def _explain_apart(platform: str, kind: str = "all-reduce") -> str:
    """Describe the compiler options that keep packs apart, in a sentence."""
    options, in_loops = KEEP_APART.get((platform, kind), {}), kind == "loop"
    listed = " and ".join(f"{name}={value}" for name, value in options.items())
    if listed:
        return (
            f"{'overlap' if in_loops else 'apart'}: by the compiler "
            f"option{'s' * (len(options) > 1)} {listed}, which `jc.data_parallel` sets for its own "
            "program; pass `Plan.compiler_options()` to your own `jax.jit`"
        )
    if in_loops:
        return f"overlap: left to the compiler for {platform}; `jc.inspect` shows the result"
    return (
        f"apart: jaxcoll knows no option that keeps {kind}s apart on {platform}; `jc.inspect` "
        "shows the result"
    )


def _why_packed(plan: CollectivePlan) -> str:
    options, world, packing = plan.options, plan.world, plan.packing
    if plan.overlap and not options.bytes_per_pack:
        return ", each sent as soon as its gradients are ready"
    automatic = UNPACKED, planner.PACKED, planner.SHARDED, planner.CODES
    if packing not in automatic or options.bytes_per_pack:
        return ", as requested"
    if packing != UNPACKED and world.over_gloo:
        return ": over Gloo every array takes long to start, and a large one even longer to copy"
    if packing != UNPACKED:
        return ", because no compiler combines exchanges of codes"
    if world.over_gloo:
        return ", as requested"
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
            return f"algorithm: NCCL was requested, but {carrier} carries it here"
        return f"algorithm: the compiler's own all-reduce, carried by {carrier}"
    described = ", then, from group to group, ".join(DESCRIPTIONS[x] for x in algorithm.split("/"))
    if options.algorithm in (None, algorithm):
        is_implied = options.reproducible and not options.algorithm
        why = "because `reproducible` is set" if is_implied else "as requested"
        return f"algorithm: {described}, {why}"
    return (
        f"algorithm: {described}; native was requested for an inner axis, but {GLOO_REDUCE_SCATTER}"
    )


def _explain_options(options: CommunicationOptions, world: World) -> Iterator[str]:
    if options.reproducible:
        yield (
            "order: every element is summed in pairs of replicas, then pairs of pairs, so that its "
            "bits do not depend on packing, placement or algorithm"
        )
    if options.shards and (owners := planner.choose(options, world).owners):
        yield f"shards: {owners} for each pack, each with an owner, as requested"
    elif options.shards:
        yield f"shards: each pack is cut into {options.shards}, reduced side by side, as requested"


def _explain_overlap(plan: CollectivePlan) -> Iterator[str]:
    packs, rule, platform = plan.packs, plan.packing, plan.world.platform
    if isinstance(rule, ReadyOrder):
        last = packs[-1].nbytes if packs else 0
        yield (
            f"packs: smaller towards the end, the last of {last:,} bytes; leaves of more than "
            f"{rule.limit:,} bytes alone"
        )
        yield (
            "order: as the gradients become ready in the backward pass"
            if any(leaf.ready is not None for leaf in plan.leaves)
            else "order: leaves from last to first, because it is not known here when each is "
            "ready; `jc.value_and_grad` and `jc.grad` read it from the backward pass"
        )
    if platform == "cpu":
        yield (
            "overlap: packs stay in order and apart as requested, but XLA's CPU runtime waits for "
            "each collective, so nothing is computed meanwhile"
        )
    if platform == "gpu" and not plan.in_backward:
        yield "apart: each pack waits for the one before, so that the compiler cannot combine them"
    else:
        yield _explain_apart(platform)


def _explain_formats(plan: CollectivePlan) -> Iterator[str]:
    """Yield which leaves travel in a wire format, and which cannot although it was requested."""
    leaves, options = plan.leaves, plan.options
    for format in dict.fromkeys(x.format for x in leaves if x.format):
        count = sum(x.format == format for x in leaves)
        blocks = f" in blocks of {format.block}" if format.block > 1 else ""
        between = any("/" in pack.algorithm and pack.format == format for pack in plan.packs)
        why = "as requested" if options.compression else "because XLA would widen them for Gloo"
        why = "which is faster over Gloo" if options.compression == "auto" else why
        yield (
            f"format: {format}{blocks} for {pluralize(count, 'leaf', 'leaves')}, {why}: codes go "
            "to the owner of each shard, which adds them in float32 and sends the sum as codes"
            + ", between groups only"
            * between
        )
    exact = [x for x in leaves if x.travels and not x.format]
    if find_format(options.compression) and exact:
        yield (
            f"exactly: {pluralize(len(exact), 'leaf', 'leaves')}, smaller than a block of "
            f"{options.compression} or of a type that it does not code"
        )
