"""A plan as users see it: a table below its reasons, JSON, and the predicted time."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

from jaxcoll._plan.plan import THE_VALUE, CollectivePlan
from jaxcoll._report.plan_reasons import explain
from jaxcoll._show.table import Shown, Table
from jaxcoll._show.units import fold, pluralize

COLUMNS = ("pack", "dtype", "algorithm", "leaves", "bytes", "carries")
MOST_ROWS = 20
"""Rows that `str(plan)` shows; the rest are counted."""


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
        return explain(self)

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
            "format": "jaxcoll plan", "version": 2, "collective": self.collective,
            "reduce_op": self.reduce_op.name, "algorithm": self.algorithm,
            "reproducible": self.reproducible, "overlap": self.overlap,
            "in_backward": self.in_backward, "platform": self.world.platform,
            "replicas": self.world.replicas, "axis_sizes": list(self.world.sizes),
            "processes": self.world.processes, "leaves": len(self.leaves), "bytes": self.nbytes,
            "steps": self.steps, "wire_bytes_per_device": self.wire_bytes,
            "temporary_bytes": self.temporary_bytes, "predicted_seconds": cost and cost.seconds,
            "predicted_from": cost and cost.source, "reasons": list(self.reasons),
            "packs": [
                {
                    "dtype": pack.dtype.name, "format": str(pack.format or ""),
                    "algorithm": pack.algorithm, "elements": pack.size, "bytes": pack.nbytes,
                    "leaves": [
                        {"path": self.leaves[s.leaf].path, "start": s.start, "elements": s.size}
                        for s in pack.segments
                    ],
                }
                for pack in self.packs
            ],
            "gathers": [
                {
                    "path": leaf.path, "dtype": leaf.dtype.name, "indices": str(leaf.indices),
                    "rows": leaf.shape[0], "bytes": leaf.gathers,
                }
                for leaf in self.gathers
            ],
        }  # fmt: skip

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Return the table's cells: pack or "rows", dtype, algorithm, leaves, bytes, carries."""
        packs = [
            (str(k), p.shown_type, p.algorithm, str(len(p.segments)), f"{p.nbytes:,}", carried)
            for k, p in enumerate(self.packs)
            for carried in [self.carried(k)]
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
