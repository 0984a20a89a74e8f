"""The plan of one reduction: a frozen value that is shown, saved, and then carried out."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
import zlib
from typing import Any

from jaxcoll._plan import explain
from jaxcoll._plan.algorithms import Stage, aligned, stages, steps, wire_bytes
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs import overlap
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import Pack, PackingRule, Segment
from jaxcoll._plan.packs.shard_layout import LANES, padded
from jaxcoll._plan.world import World
from jaxcoll._show.table import Table, folding_html, lines_html
from jaxcoll._show.units import counted, fold

COLUMNS = ("pack", "dtype", "algorithm", "leaves", "bytes", "carries")
MOST_ROWS, MOST_ROWS_HTML = 20, 40
"""Rows that `str(plan)` shows, and a notebook; the rest are counted."""

_VALUE = "(the value)"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted seconds, by what they are spent on."""

    latency: float = 0.0  # starting collectives, and waiting for first bytes
    bandwidth: float = 0.0  # bytes on links; for a measured curve all that grows with the size
    reduction: float = 0.0  # adding, where the backend does not do it on the way
    copy: float = 0.0  # into packs and out of them
    source: str = ""  # the rates that it is predicted from

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.latency + self.bandwidth + self.reduction + self.copy

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.latency + other.latency,
            self.bandwidth + other.bandwidth,
            self.reduction + other.reduction,
            self.copy + other.copy,
        )

    def __rmul__(self, count: float) -> Cost:
        parts = (self.latency, self.bandwidth, self.reduction, self.copy)
        return Cost(*[count * part for part in parts], source="")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one `all_reduce`, or of one half of it, decided from shapes alone.

    `str(plan)` is a table, of which `plan.text()` shows all rows; `plan.to_json()` is the same for
    machines.

    Attributes:
      reduce_op: SUM or MEAN.
      leaves: the leaves of the tree, in its order.
      packs: the arrays that travel; see `jaxcoll._plan.packs.packing`.
      world: where it runs.
      options: what was asked.
      packing: the rule by which leaves travel together.
      owners: replicas that sum a shard each, in a shuffle; 0: all of them.
      overlap: whether packs travel one after another, in their order, and are not to be combined.
      in_backward: whether it stands where gradients appear (`sync_in_backward`, `scan_layers`),
        perhaps in a loop, so that the program orders its packs and nothing else does.
      collective: "all_reduce", or one of its halves: "reduce_scatter" or "all_gather", whose packs
        are padded to as many rows of `lanes` elements on each replica.
      lanes: elements of a row of a half's packs; 1 where leaves are cut along their own rows.
      notes: sentences of whoever made it.
      predicted: the seconds that it is predicted to take (docs/cost_model.md), if `jc.plan` made
        it; a program that is traced predicts nothing.
    """

    reduce_op: ReduceOp
    leaves: tuple[Leaf, ...]
    packs: tuple[Pack, ...]
    world: World
    options: CommunicationOptions = dataclasses.field(compare=False)
    packing: PackingRule | None = dataclasses.field(default=None, compare=False)
    owners: int = 0
    overlap: bool = False
    in_backward: bool = False
    collective: str = "all_reduce"
    lanes: int = LANES
    notes: tuple[str, ...] = ()
    predicted: Cost | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each decision, what was asked and not done included."""
        packs, world, options = self.packs, self.world, self.options
        if self.collective == "all_reduce":
            sentences = explain.of_reduction(
                self.leaves, packs, world, options, self.packing, self.overlap, self.in_backward
            )
            return (*sentences, *self.notes)
        in_layers = self.lanes == 1
        half = explain.of_half(self.collective, packs, world, options, in_layers, self.overlap)
        return (*self.notes, *half)

    @property
    def reproducible(self) -> bool:
        """True if every element has the same bits in every other plan that is."""
        return self.options.reproducible

    @property
    def algorithm(self) -> str:
        """The algorithm of the packs, by name; several joined by " and " where they differ."""
        return " and ".join(dict.fromkeys(pack.algorithm for pack in self.packs)) or "native"

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the packs that are copies of leaves, before and after they are summed."""
        return 2 * sum(pack.nbytes for pack in self.packs if not pack.is_leaf(self.leaves))

    @functools.cached_property
    def name(self) -> str:
        """The name of the reduction in a program's scopes; equal plans share it.

        `jc.inspect` and profilers find packs by it: pack 3 travels as `<name>/pack3`.
        """
        packs = [
            (pack.shown_type, pack.over, [(s.leaf, s.start, s.size) for s in pack.segments])
            for pack in self.packs
        ]
        # Not a counter, which would differ between processes; and JAX does not number scopes.
        identity = repr((self.reduce_op.name, self.algorithm, [x.path for x in self.leaves], packs))
        return f"{self.collective}_{zlib.crc32(identity.encode()) & 0xFFFFFF:06x}"

    @property
    def gathers(self) -> tuple[Leaf, ...]:
        """The `IndexedSlices` among the leaves, whose rows and indices every replica gathers."""
        return tuple(leaf for leaf in self.leaves if leaf.gathers)

    @property
    def nbytes(self) -> int:
        """Bytes that one replica puts into all packs and gathers together."""
        return sum(p.nbytes for p in self.packs) + sum(leaf.gathers for leaf in self.gathers)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave the device that sends most, padding included."""
        n = self.world.replicas
        if self.collective != "all_reduce":
            return sum(
                wire_bytes(self.stages(p), padded(p.size, n, self.lanes), p.dtype.itemsize) // 2
                for p in self.packs
            )
        packed = sum(
            wire_bytes(self.stages(p), sum(p.lengths), p.dtype.itemsize) for p in self.packs
        )
        return packed + sum((math.prod(x.over) - 1) * x.gathers for x in self.gathers)

    @property
    def steps(self) -> int:
        """Collectives that are requested; the compiler may combine those of its own kind."""
        of_packs = sum(steps(self.stages(pack)) for pack in self.packs)
        if self.collective != "all_reduce":
            # The compiler's own all-reduce, at the end, is one step and would be two halves.
            last = [self.stages(pack)[-1:] for pack in self.packs]
            return (of_packs + sum(s.algorithm == "native" for at in last for s in at)) // 2
        return of_packs + 2 * len(self.gathers)

    def stages(self, pack: Pack) -> tuple[Stage, ...]:
        """Return the stages along each axis that sum `pack`, inner first."""
        return stages(pack.algorithm, self.owners, pack.over, pack.format)

    def elements(self, pack: Pack) -> int:
        """Elements of the array that is summed: in a wire format whole blocks for each replica."""
        if not pack.format:
            return pack.size
        return aligned(self.stages(pack), sum(pack.lengths))

    @property
    def chained(self) -> bool:
        """True if each pack waits for the sum of the one before.

        It keeps packs apart in any program on GPUs; on TPUs it would cost most of what overlaps,
        and where gradients appear one after another it would only hold them up.
        """
        return self.overlap and not self.in_backward and self.world.platform != "tpu"

    def compiler_options(self, platform: str | None = None) -> dict[str, Any]:
        """Return compiler options that keep the packs of a program with this plan apart.

        Args:
          platform: "cpu", "gpu" or "tpu"; None: that of the plan.

        Returns:
          Options for `jax.jit(..., compiler_options=...)`, which hold for one program and not for
          the process; {} if none are needed.
        """
        platform = platform or self.world.platform
        kind = self.collective.replace("_", "-")
        if self.in_backward and self.collective != "all_reduce":
            kind = "loop"
        chained = platform == "gpu" and kind == "all-reduce" and not self.in_backward
        return dict(
            overlap.OPTIONS.get((platform, kind), {}) if self.overlap and not chained else {}
        )

    def carried(self, pack: int) -> str:
        """The first and the last leaf that a pack carries, with the part of it where it is cut."""

        def name(segment: Segment) -> str:
            leaf = self.leaves[segment.leaf]
            start, end = segment.start, segment.start + segment.size
            part = f" elements {start}:{end}" if segment.size < leaf.size else ""
            return (leaf.path or _VALUE) + part

        ends = (self.packs[pack].segments[0], self.packs[pack].segments[-1])
        return " … ".join(map(name, ends[: len(self.packs[pack].segments)]))

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain numbers and strings, bytes and elements counted on one replica."""
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

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """The table's cells: pack or "rows", dtype, algorithm, leaves, bytes, what it carries."""
        packs = [
            (str(k), p.shown_type, p.algorithm, str(len(p.segments)), f"{p.nbytes:,}", carries)
            for k, p in enumerate(self.packs)
            for carries in [self.carried(k)]
        ]
        rows = [
            ("rows", leaf.dtype.name, "native", "1", f"{leaf.gathers:,}", leaf.path or _VALUE)
            for leaf in self.gathers
        ]
        return packs + rows

    @property
    def headline(self) -> str:
        """The reduction, its world, and the bytes that it sends, in one sentence."""
        called = self.collective + f" {self.reduce_op.name}" * (self.collective != "all_gather")
        return (
            f"{called} of {counted(len(self.leaves), 'leaf', 'leaves')}, "
            f"{counted(self.nbytes, 'byte')} a replica, over {self.world}: "
            f"{counted(len(self.packs) + 2 * len(self.gathers), 'array')}, "
            f"{counted(self.steps, 'step')}, {counted(self.wire_bytes, 'wire byte')} a device"
        )

    @property
    def prediction(self) -> str:
        """The predicted time and its source, in one sentence; "" if nobody predicted."""
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
          rows: of the table at most; None: all.
          width: of a line at most: sentences are folded, and rows cut; None: any.
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

    def _repr_html_(self) -> str:
        rows = self.rows()
        left = len(rows) - MOST_ROWS_HTML
        more = f"… and {left:,} more" if left > 0 else ""
        table = Table(COLUMNS, "><<>><", rows[:MOST_ROWS_HTML], more=more)
        folding = folding_html("arrays", table.html()) if rows else ""
        return (
            f"<div><p><b>{html.escape(self.headline)}</b></p>{lines_html(self.reasons)}"
            f"{lines_html([self.prediction] if self.predicted else [], 'opacity:.65')}"
            f"{folding}</div>"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…" if cycle else str(self))  # IPython's plain text: the table, too
