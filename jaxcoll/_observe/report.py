"""What a program asked for and what the compiler made of it, as one frozen value."""

from __future__ import annotations

import dataclasses
import importlib
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll._observe import report_text
from jaxcoll._observe.match import Origin, join
from jaxcoll._observe.parse.collective import Collective, Groups
from jaxcoll._observe.parse.hlo import read_program
from jaxcoll._observe.parse.narrow_sums import narrow_sums
from jaxcoll._observe.parse.stablehlo import read_stablehlo
from jaxcoll._observe.report_data import PackedLeaves, ReportData
from jaxcoll._observe.timeline import trace
from jaxcoll._plan.cost.terms import Terms, terms_of
from jaxcoll._plan.plan import Plan
from jaxcoll._show import codec

_SAME = ("name", "where", "devices", "instructions", "uncounted", "notes")
_HELD = ("argument", "output", "temp")


@dataclasses.dataclass(frozen=True)
class Report(ReportData):
    """Requested beside compiled: every collective of a program, read from its texts.

    `print(report)` is a table, `report.plot()` a picture of the schedule, `report.to_json()` the
    same for machines; made by `jc.inspect`. Nothing of it was run.

    Attributes:
      name: what was compiled, as in jit_step.
      where: the topology it was compiled for; "" if not known.
      devices: how many devices it is for.
      requested: what the program asks for, as it was lowered; None if only compiled text is known.
      collectives: what it was compiled to, in the order of the schedule; an asynchronous pair is
        one.
      origins: for each of `collectives`, which of `requested` it carries out.
      packs: what each pack carries, of the plans that were recorded.
      matmuls: the instructions that multiply matrices.
      loops: the loops that collectives or matrix products stand in.
      instructions: of one run, the body of each loop once.
      uncounted: what may send and is not counted, and why; empty if nothing is left out.
      notes: what else is not known, and why; and what should not be so.
      terms: what the devices it was compiled for cost; None if that is not known.
      memory_bytes: what the program takes of one device at most: arguments, results that take no
        argument's place, and all temporary memory; None if that is not known.
      plans: the plans of the reductions by jaxcoll, in order; lost on the way through JSON.
    """

    def to_dict(self) -> dict[str, Any]:
        """The report in plain numbers and strings, bytes and elements counted on one device."""
        # Its own fields, and beside them what can be derived: totals, packs, changes.
        groups: dict[Groups, int] = {}
        requested = None
        if self.requested is not None:
            requested = [_collective(r, groups) for r in self.requested]
        compiled = [
            {
                **_collective(c, groups),
                "requested": list(origin.requested),
                "requested_known_by": origin.by,
                "again": origin.again,
                "packs": list(self.packs_of(k)),
                "leaves": list(self.leaves_of(k)),
                "changes": list(self.changes(k)),
                "predicted_seconds": self.seconds_of(k),
                "exposed_seconds": self.exposed_of(k),
            }
            for k, (c, origin) in enumerate(zip(self.collectives, self.origins, strict=True))
        ]
        return {
            **{name: codec.plain(getattr(self, name)) for name in _SAME},
            "count": self.count,
            "runs": self.runs,
            "wire_bytes_per_device": self.wire_bytes,
            "requested_wire_bytes_per_device": self.requested_wire_bytes,
            "overlap": {
                "overlapped": self.overlapped,
                "bytes": {
                    kind: {"sent": s.nbytes, "behind_matmuls": s.behind}
                    for kind, s in self.overlap.shares.items()
                },
                "flops": self.overlap.flops,
                "seconds": self.seconds,
                "exposed_seconds": self.exposed_seconds,
            },
            "dropped": list(self.dropped),
            "requested": requested,
            "compiled": compiled,
            "groups": [[list(group) for group in each] for each in groups],
            "packs": [
                {"name": p.name, "dtype": p.dtype, "bytes": p.nbytes, "leaves": list(p.leaves)}
                for p in self.packs
            ],
            "matmuls": [list(codec.plain(m).values()) for m in self.matmuls],
            "loops": [list(codec.plain(x).values()) for x in self.loops],
            "terms": None if self.terms is None else self.terms.to_dict(),
            "memory_bytes_per_device": self.memory_bytes,
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote; equal to it, but without `plans`.

        Raises:
          ValueError: the text is not such JSON.
        """
        try:
            data = json.loads(text)
            groups = codec.read(tuple[Groups, ...], data["groups"])
            asked, made = data["requested"], data["compiled"]
            kinds = typing.get_type_hints(ReportData)
            return cls(
                **{
                    name: codec.read(kinds[name], data[name])
                    for name in (*_SAME, "matmuls", "loops")
                },
                requested=None if asked is None else tuple(_read(r, groups) for r in asked),
                collectives=tuple(_read(c, groups) for c in made),
                origins=codec.read(
                    tuple[Origin, ...],
                    [[c["requested"], c["requested_known_by"], c["again"]] for c in made],
                ),
                packs=codec.read(
                    tuple[PackedLeaves, ...],
                    [
                        [p[key] for key in ("name", "dtype", "bytes", "leaves")]
                        for p in data["packs"]
                    ],
                ),
                terms=None if data["terms"] is None else terms_of(data["terms"]),
                memory_bytes=data.get("memory_bytes_per_device"),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ValueError(
                f"expected what `Report.to_json` writes; got {text[:60]!r} ({error!r})."
            ) from error

    def plot(
        self,
        path: str | Path | None = None,
        *,
        seconds: Callable[[Collective], float] | None = None,
    ) -> Any:
        """Draw the compiled schedule: collectives by pack, matrix products, and what is hidden.

        Args:
          path: a file to write, its ending saying the format.
          seconds: a prediction for one collective, which the bar of hidden and exposed
            communication counts; None: that of the cost model, from `terms`, and bytes where
            these are not known.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return _drawn("plot", path, self, seconds)

    def timeline(
        self,
        path: str | Path | None = None,
        *,
        name: str = "",
        beside: Mapping[str, Report] | None = None,
    ) -> Any:
        """Draw the compiled schedule over time, as the cost model predicts it.

        One lane multiplies, one carries; where the program comes to the end of a collective that
        is not through, everything waits. A matrix product takes its operations at the rate of its
        type, everything else no time, so that more waits than would.

        Args:
          path: a file to write, its ending saying the format.
          name: above the panel; "": the program's.
          beside: other reports, drawn below on the same axis, by their names.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ValueError: `terms` are not known, or do not say how fast matrices are multiplied.
          ImportError: matplotlib is not installed.
        """
        return _drawn("timeline", path, {name or self.name: self, **(beside or {})})

    def chrome_trace(self, path: str | Path) -> None:
        """Write the timeline as a Chrome trace, which https://ui.perfetto.dev opens.

        Args:
          path: a JSON file to write.

        Raises:
          ValueError: as in `timeline`.
        """
        Path(path).write_text(json.dumps(trace(self)), "utf8")

    def __str__(self) -> str:
        return report_text.text(self)

    def _repr_html_(self) -> str:
        return report_text.html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…" if cycle else str(self))  # IPython's plain text: the table, too


def _collective(c: Collective, groups: dict[Groups, int]) -> dict[str, Any]:
    return codec.plain(c) | {
        "operands": [[operand.dtype, list(operand.shape)] for operand in c.operands],
        "groups": groups.setdefault(c.groups, len(groups)),  # each once; they are long
        "bytes": c.nbytes,
        "wire_bytes": c.wire_bytes,
    }


def _read(data: Mapping[str, Any], groups: tuple[Groups, ...]) -> Collective:
    known = {f.name: data[f.name] for f in dataclasses.fields(Collective) if f.name in data}
    return codec.read(Collective, {**known, "groups": groups[data["groups"]]})


def _drawn(method: str, path: str | Path | None, *shown: Any) -> Any:
    """The figure of a method, written to `path` if there is one."""
    try:
        pictures = importlib.import_module("jaxcoll._observe.report_picture")
    except ImportError as error:
        raise ImportError(
            f"`Report.{method}` needs matplotlib, which is not installed: "
            "pip install 'jaxcoll[cli]'."
        ) from error
    figure = getattr(pictures, method)(*shown)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=Path(path).suffix[1:] or "png")
    return figure


def report_of(
    compiled: str,
    requested: str | None = None,
    plans: Sequence[Plan] = (),
    where: str = "",
    terms: Terms | None = None,
    notes: Sequence[str] = (),
    memory: Mapping[str, int] | None = None,
) -> Report:
    """A report from texts alone: HLO, and the StableHLO that it came from, if that is known.

    `memory` is bytes on one device of arguments, results, results that take an argument's place,
    and all that is temporary, by XLA's names.
    """
    program = read_program(compiled)
    asked, more = None, []
    try:
        if requested is not None:
            asked, more = read_stablehlo(requested), narrow_sums(requested)
    except ValueError as error:  # its notation is not known
        more = [f"what was requested could not be read: {error}"]
    known = program._replace(notes=(*program.notes, *more, *notes))._asdict()
    return Report(
        **known,
        where=where,
        requested=asked,
        origins=join(asked or (), program.collectives),
        packs=tuple(_packed(plans)),
        terms=terms,
        memory_bytes=sum(memory[x] for x in _HELD) - memory["alias"] if memory else None,
        plans=tuple(plans),
    )


def _packed(plans: Sequence[Plan]) -> list[PackedLeaves]:
    found: dict[str, PackedLeaves] = {}
    for plan in plans:
        for k, pack in enumerate(plan.packs):
            name = f"{plan.name}/pack{k}"
            paths = tuple(dict.fromkeys(plan.leaves[s.leaf].path for s in pack.segments))
            found[name] = PackedLeaves(name, pack.shown_type, pack.nbytes, paths)
        for k, leaf in enumerate(plan.leaves):
            if leaf.gathers:
                name = f"{plan.name}/rows{k}"
                found[name] = PackedLeaves(name, leaf.dtype.name, leaf.gathers, (leaf.path,))
    return list(found.values())
