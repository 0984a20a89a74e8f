"""A plan as it is shown: its reasons in sentences, a table, a notebook's picture, JSON."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
from typing import Any

from jaxcoll._plan import explain
from jaxcoll._plan.collective_plan import THE_VALUE, CollectivePlan
from jaxcoll._show.table import Table, folding_html, lines_html
from jaxcoll._show.units import counted, fold

COLUMNS = ("pack", "dtype", "algorithm", "leaves", "bytes", "carries")
MOST_ROWS, MOST_ROWS_HTML = 20, 40
"""Rows that `str(plan)` shows, and a notebook; the rest are counted."""


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
class Plan(CollectivePlan):
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
      predicted: the seconds that it is predicted to take (docs/clusters.md), if `jc.plan` made
        it; a program that is traced predicts nothing.
    """

    predicted: Cost | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(cls, plan: CollectivePlan) -> Plan:
        """Return a plan that a trace carries out as one that can be shown."""
        return cls(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})

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
    def temporary_bytes(self) -> int:
        """Bytes of the packs that are copies of leaves, before and after they are summed."""
        return 2 * sum(pack.nbytes for pack in self.packs if not pack.is_leaf(self.leaves))

    @property
    def nbytes(self) -> int:
        """Bytes that one replica puts into all packs and gathers together."""
        return sum(p.nbytes for p in self.packs) + sum(leaf.gathers for leaf in self.gathers)

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
            ("rows", leaf.dtype.name, "native", "1", f"{leaf.gathers:,}", leaf.path or THE_VALUE)
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
