"""The plans of the two halves of an all-reduce, over a layout that is made already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxcoll._plan.choose import choose
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs import overlap
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import Pack, Segment
from jaxcoll._plan.packs.shard_layout import LANES
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.wire_formats import named
from jaxcoll._plan.world import World
from jaxcoll._show.units import counted

Half = Literal["reduce_scatter", "all_gather"]


def plan_half(
    half: Half,
    reduce_op: ReduceOp,
    packs: Sequence[Pack],
    leaves: Sequence[Leaf],
    options: CommunicationOptions,
    world: World,
    terms: Terms,
) -> Plan:
    """What carries packs that every replica has as many rows of, and why."""
    if options.shards:
        raise ValueError(
            f"`{half}` has one shard for each replica, and `shards={options.shards}` asks for "
            "another number: leave `shards` unset."
        )
    if named(options.compression) is not None:
        raise ValueError(
            f"`{half}` travels exactly, and `compression` {str(options.compression)!r} is for "
            "`all_reduce`: leave `compression` unset here."
        )
    choice = choose(options.replace(bytes_per_pack=UNSET), world)
    algorithm, reason = _carried(choice.algorithm, choice.reasons[0], world)
    how = (
        f"packs: {len(packs)}, laid out in rows of {LANES}, as many on each of "
        f"{counted(world.replicas, 'replica')}"
    )
    reasons = (how, reason, *choice.reasons[1:])
    if options.overlap:
        reasons += (overlap.by_options(world.platform, half.replace("_", "-")),)
    common = {"over": world.sizes, "kind": (), "algorithm": algorithm}
    return Plan(
        reduce_op=reduce_op,
        leaves=tuple(Leaf(x.path, x.shape, x.dtype, x.wire, world.sizes) for x in leaves),
        packs=tuple(
            dataclasses.replace(p, dtype=leaves[p.segments[0].leaf].wire, **common) for p in packs
        ),
        owners=0,
        world=world,
        terms=terms,
        reasons=reasons,
        reproducible=options.reproducible,
        overlap=bool(options.overlap),
        collective=half,
    )


def plan_rows(
    half: Half,
    reduce_op: ReduceOp,
    leaves: Sequence[Leaf],
    packs: Sequence[Pack],
    options: CommunicationOptions,
    world: World,
    terms: Terms,
    turns: int,
    when: str,
) -> Plan:
    """What carries one layer's leaves, each cut along its first dimension, `turns` times."""
    n = world.replicas
    spans = [tuple(Segment(s.leaf, s.start * n, s.size * n) for s in p.segments) for p in packs]
    whole = [dataclasses.replace(p, segments=s) for p, s in zip(packs, spans, strict=True)]
    apart = world.platform == "gpu" if options.overlap is None else options.overlap
    unasked = options.replace(overlap=UNSET)
    plan = plan_half(half, reduce_op, whole, leaves, unasked, world, terms)
    plan = dataclasses.replace(plan, lanes=1, overlap=apart, in_backward=True)
    reasons = plan.reasons[1:]  # without how whole packs are laid out
    widened = [p for p in plan.packs if p.algorithm == "native" and p.dtype.name == "bfloat16"]
    if widened and world.platform == "cpu":
        reasons += ("dtypes: bfloat16, which the compiler for CPUs widens to float32 on the wire",)
    if apart:
        reasons += (overlap.by_options(world.platform, "loop"),)
    times = (
        f"layers: one at a time, {when}: {counted(turns, 'time')}, and so "
        f"{counted(turns * plan.wire_bytes, 'wire byte')} a device in all"
    )
    return dataclasses.replace(plan, reasons=(times, *reasons))


def _carried(algorithm: str, why: str, world: World) -> tuple[str, str]:
    """What stands in for Gloo's own reduce-scatter, and why."""
    if not world.over_gloo or "native" not in algorithm.split("/"):
        return algorithm, why.replace("own all-reduce", "own reduce-scatter and all-gather")
    in_pairs = algorithm == "native" and world.replicas.bit_count() == 1
    spared = "halving_doubling" if in_pairs else algorithm.replace("native", "shuffle")
    return spared, (
        f"algorithm: {spared}, because Gloo's own reduce-scatter sends more than it has to, and is "
        "reported to go wrong (jax#40830)"
    )
