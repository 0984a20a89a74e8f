"""The plans of the two halves of an all-reduce, over a layout that is made already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import Pack, Segment
from jaxcoll._plan.planner import half_algorithm
from jaxcoll._plan.world import World
from jaxcoll._show.units import counted
from jaxcoll._wire.format import named

Half = Literal["reduce_scatter", "all_gather"]


def plan_half(
    half: Half,
    reduce_op: ReduceOp,
    packs: Sequence[Pack],
    leaves: Sequence[Leaf],
    options: CommunicationOptions,
    world: World,
) -> CollectivePlan:
    """Return the plan of packs of which every replica has as many rows."""
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
    shared = {"over": world.sizes, "kind": (), "algorithm": half_algorithm(options, world)}
    return CollectivePlan(
        reduce_op=reduce_op,
        leaves=tuple(Leaf(x.path, x.shape, x.dtype, x.wire, world.sizes) for x in leaves),
        packs=tuple(
            dataclasses.replace(p, dtype=leaves[p.segments[0].leaf].wire, **shared) for p in packs
        ),
        world=world,
        options=options,
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
    turns: int,
    when: str,
) -> CollectivePlan:
    """Return the plan of one layer's leaves, each cut along its first dimension, `turns` times."""
    n = world.replicas
    spans = [tuple(Segment(s.leaf, s.start * n, s.size * n) for s in p.segments) for p in packs]
    whole = [dataclasses.replace(p, segments=s) for p, s in zip(packs, spans, strict=True)]
    apart = world.platform == "gpu" if options.overlap is None else options.overlap
    plan = plan_half(half, reduce_op, whole, leaves, options.replace(overlap=UNSET), world)
    plan = dataclasses.replace(plan, lanes=1, overlap=apart, in_backward=True)
    times = (
        f"layers: one at a time, {when}: {counted(turns, 'time')}, and so "
        f"{counted(turns * plan.wire_bytes, 'wire byte')} a device in all"
    )
    return dataclasses.replace(plan, notes=(times,))
