"""A plan as users see it: reasons in sentences, a table, JSON."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

from jaxcoll._compression.format import named
from jaxcoll._plan import choose as planner
from jaxcoll._plan.algorithms import DESCRIPTIONS
from jaxcoll._plan.collective_plan import THE_VALUE, CollectivePlan
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions
from jaxcoll._plan.packs.packing import KEEP_APART, LANES, UNPACKED, ReadyOrder
from jaxcoll._plan.world import World
from jaxcoll._show.table import Shown, Table
from jaxcoll._show.units import binary_size, fold, pluralize

COLUMNS = ("pack", "dtype", "algorithm", "leaves", "bytes", "carries")
MOST_ROWS = 20
"""Rows that `str(plan)` shows; the rest are counted."""

GLOO_REDUCE_SCATTER = (
    "Gloo's own reduce-scatter sends more than necessary and has a reported bug (jax#40830)"
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted seconds, by what they are spent on."""

    latency: float = 0.0  # starting collectives, and waiting for first bytes
    bandwidth: float = 0.0  # bytes on links; in a measured curve, all that grows with the size
    reduction: float = 0.0  # adding, unless the backend adds on the way
    copy: float = 0.0  # copies into packs and out of them
    source: str = ""  # the rates behind the prediction

    @property
    def seconds(self) -> float:
        """The total."""
        return sum(self._parts)

    @property
    def _parts(self) -> tuple[float, ...]:
        return self.latency, self.bandwidth, self.reduction, self.copy

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, self._parts, other._parts), source="")

    def __rmul__(self, count: float) -> Cost:
        return Cost(*[count * part for part in self._parts], source="")


@dataclasses.dataclass(frozen=True)
class Plan(Shown, CollectivePlan):
    """The plan of one `all_reduce`, or of one half of it, decided from shapes alone.

    `str(plan)` is a table; `plan.text()` shows all of its rows, and `plan.to_json()` is for
    machines.

    Attributes:
      reduce_op: SUM or MEAN.
      leaves: the leaves of the tree, in its order.
      packs: the arrays that travel; see `jaxcoll._plan.packs.packing`.
      world: the replicas, processes and hosts of the collective.
      options: the options that it was planned with.
      packing: the rule that groups leaves into packs.
      owners: replicas that sum a shard each, in a shuffle; 0: all of them.
      overlap: whether packs travel one after another, in order and not combined.
      in_backward: whether it is inside the backward pass (`sync_in_backward`, `scan_layers`),
        perhaps in a loop, so that only the program orders its packs.
      collective: "all_reduce", or one of its halves: "reduce_scatter" or "all_gather", whose packs
        are padded to equally many rows of `lanes` elements on each replica.
      lanes: elements in a row of a half's packs; 1 if leaves are cut along their first dimension.
      notes: sentences from the function that made the plan.
      predicted: the predicted seconds (docs/clusters.md), if `jc.plan` made the plan; None in a
        traced program.
    """

    predicted: Cost | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(cls, plan: CollectivePlan) -> Plan:
        """Convert the plan that a trace carries out into one that can be shown."""
        return cls(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})

    @functools.cached_property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each decision, including requests that were not followed."""
        if self.collective == "all_reduce":
            return (*_explain_reduction(self), *self.notes)
        return (*self.notes, *_explain_half(self))

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the packs that are copies of leaves, before and after they are summed."""
        return 2 * sum(pack.nbytes for pack in self.packs if not pack.is_leaf(self.leaves))

    @property
    def nbytes(self) -> int:
        """Bytes that one replica contributes to all packs and gathers together."""
        return sum(p.nbytes for p in self.packs) + sum(leaf.gathers for leaf in self.gathers)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and strings; bytes and elements are one replica's."""
        cost = self.predicted
        return {
            "format": "jaxcoll plan",
            "version": 2,
            "collective": self.collective,
            "reduce_op": self.reduce_op.name,
            "algorithm": self.algorithm,
            "reproducible": self.reproducible,
            "overlap": self.overlap,
            "in_backward": self.in_backward,
            "platform": self.world.platform,
            "replicas": self.world.replicas,
            "axis_sizes": list(self.world.sizes),
            "processes": self.world.processes,
            "leaves": len(self.leaves),
            "bytes": self.nbytes,
            "steps": self.steps,
            "wire_bytes_per_device": self.wire_bytes,
            "temporary_bytes": self.temporary_bytes,
            "predicted_seconds": cost and cost.seconds,
            "predicted_from": cost and cost.source,
            "reasons": list(self.reasons),
            "packs": [
                {
                    "dtype": pack.dtype.name,
                    "format": str(pack.format or ""),
                    "algorithm": pack.algorithm,
                    "elements": pack.size,
                    "bytes": pack.nbytes,
                    "leaves": [
                        {"path": self.leaves[s.leaf].path, "start": s.start, "elements": s.size}
                        for s in pack.segments
                    ],
                }
                for pack in self.packs
            ],
            "gathers": [
                {
                    "path": leaf.path,
                    "dtype": leaf.dtype.name,
                    "indices": str(leaf.indices),
                    "rows": leaf.shape[0],
                    "bytes": leaf.gathers,
                }
                for leaf in self.gathers
            ],
        }

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Return the table's cells: pack or "rows", dtype, algorithm, leaves, bytes, carries."""
        packs = [
            (str(k), p.shown_type, p.algorithm, str(len(p.segments)), f"{p.nbytes:,}", carries)
            for k, p in enumerate(self.packs)
            for carries in [self.carried(k)]
        ]
        rows = [
            ("rows", leaf.dtype.name, "native", "1", f"{leaf.gathers:,}", leaf.path or THE_VALUE)
            for leaf in self.gathers
        ]
        return packs + rows

    @property
    def headline(self) -> str:
        """The reduction, its world, and the bytes that it sends, in one sentence."""
        called = self.collective + f" {self.reduce_op.name}" * (self.collective != "all_gather")
        return (
            f"{called} of {pluralize(len(self.leaves), 'leaf', 'leaves')}, "
            f"{pluralize(self.nbytes, 'byte')} a replica, over {self.world}: "
            f"{pluralize(len(self.packs) + 2 * len(self.gathers), 'array')}, "
            f"{pluralize(self.steps, 'step')}, {pluralize(self.wire_bytes, 'wire byte')} a device"
        )

    @property
    def prediction(self) -> str:
        """The predicted time and its source, in one sentence; "" without a prediction."""
        if (cost := self.predicted) is None:
            return ""
        return (
            f"predicted: {cost.seconds * 1e3:.3g} ms ({cost.latency * 1e3:.3g} latency, "
            f"{cost.bandwidth * 1e3:.3g} bandwidth, {cost.reduction * 1e3:.3g} sums, "
            f"{cost.copy * 1e3:.3g} copies), from {cost.source}"
        )

    def text(self, rows: int | None = None, width: int | None = None) -> str:
        """Return the text of `str(plan)`, with all rows of the table.

        Args:
          rows: the most rows of the table; None: all.
          width: the most characters in a line: sentences are folded, rows cut; None: any number.
        """
        cells = self.rows()
        shown = cells if rows is None or len(cells) <= rows else cells[: rows - 1]
        left = len(cells) - len(shown)
        more = f"… and {left:,} more: `plan.text()`, or --all-rows, shows them" if left else ""
        lines = [self.headline, *self.reasons, *filter(None, [self.prediction])]
        lines = lines if width is None else [fold(line, width) for line in lines]
        return "\n".join([*lines, Table(COLUMNS, ">>>>><", shown, more=more).text(width)])

    def __str__(self) -> str:
        return self.text(MOST_ROWS)


def _explain_reduction(plan: CollectivePlan) -> Iterator[str]:
    """Yield a sentence for each decision about an all-reduce."""
    leaves, packs, world, options = plan.leaves, plan.packs, plan.world, plan.options
    if not plan.overlap or not isinstance(plan.packing, ReadyOrder):
        yield f"packs: {plan.packing}{_why_packed(plan)}"
    algorithm = planner.requested_algorithm(options, world)
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
    if algorithm != planner.requested_algorithm(options, world):
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
    if packing not in (UNPACKED, planner.PACKED, planner.CODES) or options.bytes_per_pack:
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
    if named(options.compression) and exact:
        yield (
            f"exactly: {pluralize(len(exact), 'leaf', 'leaves')}, smaller than a block of "
            f"{options.compression} or of a type that it does not code"
        )
