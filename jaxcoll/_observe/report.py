"""What a program asked for and what the compiler made of it, as one frozen value."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxcoll._files import replacing
from jaxcoll._observe import report_json, report_text
from jaxcoll._observe.compiler_changes import changes
from jaxcoll._observe.match import Origin
from jaxcoll._observe.overlap import Overlap, exposed, overlap
from jaxcoll._observe.parse.calls import Loop, Matmul
from jaxcoll._observe.parse.collective import Collective, runs, wire_bytes
from jaxcoll._observe.parse.names import names, pack_of
from jaxcoll._observe.predicted_time import predicted
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class PackedLeaves:
    """What one pack of a plan carries.

    Attributes:
      name: the reduction's name and the pack's number, as the program's scopes have them.
      dtype: the type it was planned to travel in.
      nbytes: bytes of it that one replica puts in.
      leaves: their paths in the reduced tree, "" for a bare array.
    """

    name: str
    dtype: str
    nbytes: int
    leaves: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """Requested beside compiled: every collective of a program, read from its texts.

    `print(report)` is a table, `report.plot()` a picture of the schedule, `report.to_json()` the
    same for machines; made by `jc.inspect`. Nothing of it was run.

    Attributes:
      name: what was compiled, as in jit_step.
      where: the topology it was compiled for; "" if that was not said.
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
      plans: the plans of the reductions by jaxcoll, in order; lost on the way through JSON.
    """

    name: str
    where: str
    devices: int
    requested: tuple[Collective, ...] | None
    collectives: tuple[Collective, ...]
    origins: tuple[Origin, ...]
    packs: tuple[PackedLeaves, ...]
    matmuls: tuple[Matmul, ...]
    loops: tuple[Loop, ...]
    instructions: int
    uncounted: tuple[str, ...]
    notes: tuple[str, ...]
    terms: Terms | None = None
    plans: tuple[Plan, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def count(self) -> int:
        """Collectives of the compiled program, each once however often its loop turns."""
        return len(self.collectives)

    @property
    def runs(self) -> int:
        """Collectives that one run carries out; a loop that does not say counts one turn."""
        return runs(self.collectives, unknown_trips=1)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device when the program runs once.

        They are what a byte-optimal implementation of each collective sends. A loop that does
        not say how often it turns counts one turn, and `uncounted` says so.
        """
        return wire_bytes(self.collectives, unknown_trips=1)

    @property
    def requested_wire_bytes(self) -> int | None:
        """Likewise, of the program as it was requested; None if that is not known."""
        if self.requested is None:
            return None
        found = (
            dataclasses.replace(r, trips=self.requested_trips(i))
            for i, r in enumerate(self.requested)
        )
        return wire_bytes(found, unknown_trips=1)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Positions in `requested` of which nothing is seen in the compiled program."""
        carried = {i for origin in self.origins for i in origin.requested}
        return tuple(i for i in range(len(self.requested or ())) if i not in carried)

    @functools.cached_property
    def carriers(self) -> Counter[int]:
        """For each position in `requested`, how many collectives share it among them."""
        shared = (origin.requested for origin in self.origins if not origin.again)
        return Counter(i for requested in shared for i in requested)

    def requested_trips(self, i: int) -> int | None:
        """How often one run carries out `requested[i]`; loops are asked in the compiled program."""
        found = (self.requested or ())[i]
        if found.trips is not None:
            return found.trips
        turns = [
            (origin.again, c.trips)
            for origin, c in zip(self.origins, self.collectives, strict=True)
            if i in origin.requested
        ]
        if not turns or any(trips is None for _, trips in turns):
            return None
        first = max((t for again, t in turns if not again and t is not None), default=0)
        return first + sum(t for again, t in turns if again and t is not None)

    def packs_of(self, k: int) -> tuple[str, ...]:
        """The packs of jaxcoll that `collectives[k]` carries; () where no name says so."""
        origin, compiled = self.origins[k], self.collectives[k]
        asked = [names((self.requested or ())[i].op_name) for i in origin.requested]
        found = [pack_of(n) for each in [*asked, names(compiled.op_name)] for n in each]
        return tuple(dict.fromkeys(filter(None, found)))

    def leaves_of(self, k: int) -> tuple[str, ...]:
        """Paths of the leaves that `collectives[k]` carries, whole or in part, if plans say."""
        known = {pack.name: pack.leaves for pack in self.packs}
        return tuple(
            dict.fromkeys(leaf for name in self.packs_of(k) for leaf in known.get(name, ()))
        )

    def sources_of(self, k: int) -> tuple[str, ...]:
        """The lines of Python that asked for `collectives[k]`, as file:line."""
        asked = [(self.requested or ())[i].source for i in self.origins[k].requested]
        return tuple(dict.fromkeys(filter(None, [*asked, self.collectives[k].source])))

    def seconds_of(self, k: int) -> float | None:
        """What the cost model expects `collectives[k]` to take each time; None without terms."""
        return None if self.terms is None else predicted(self.collectives[k], self.terms)

    @functools.cached_property
    def overlap(self) -> Overlap:
        """What the schedule hides behind matrix products, in bytes and operations."""
        return overlap(self.collectives, self.matmuls)

    @property
    def overlapped(self) -> float | None:
        """Share of the reduced bytes that travel behind matrix products; None if none is reduced.

        Counted are all-reduces and reduce-scatters, loops' turns included; behind products are
        those in asynchronous collectives with a product scheduled between their start and end.
        """
        reduced = self.overlap.reduced
        return reduced.behind / reduced.nbytes if reduced.nbytes else None

    @functools.cached_property
    def seconds(self) -> float | None:
        """What the cost model expects one run to communicate; None without terms."""
        each = [self.seconds_of(k) for k in range(self.count)]
        turns = (1 if c.trips is None else c.trips for c in self.collectives)
        return None if None in each else sum(n * s for n, s in zip(turns, each, strict=True) if s)

    @property
    def exposed_seconds(self) -> float | None:
        """Of `seconds`, what no matrix product hides (docs/cost_model.md); None if not known."""
        left = self._exposed
        return None if left is None else sum(left)

    def exposed_of(self, k: int) -> float | None:
        """Seconds of `collectives[k]` in one run that no product hides; None if not known."""
        return None if self._exposed is None else self._exposed[k]

    @functools.cached_property
    def _exposed(self) -> list[float] | None:
        if self.terms is None:
            return None
        seconds = [predicted(c, self.terms) for c in self.collectives]
        return exposed(self.collectives, seconds, self.matmuls, self.terms)

    def changes(self, k: int) -> tuple[str, ...]:
        """What the compiler did to `collectives[k]`, in words."""
        return tuple(changes(self, k))

    def to_dict(self) -> dict[str, Any]:
        """The report in plain numbers and strings, bytes and elements counted on one device."""
        return report_json.to_dict(self)

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote; equal to it, but without `plans`.

        Raises:
          ValueError: the text is no such JSON.
        """
        try:
            return cls(**report_json.fields(json.loads(text), PackedLeaves))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
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
        draw = _picture("report_picture", "plot")
        return _saved(draw(self, seconds), path)

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
        draw = _picture("timeline_picture", "timeline")
        return _saved(draw({name or self.name: self, **(beside or {})}), path)

    def __str__(self) -> str:
        return report_text.text(self)

    def _repr_html_(self) -> str:
        return report_text.html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…" if cycle else str(self))  # IPython's plain text: the table, too


def _picture(module: str, method: str) -> Callable[..., Any]:
    """The function that draws.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        return importlib.import_module(f"jaxcoll._observe.{module}").draw
    except ImportError as error:
        raise ImportError(
            f"`Report.{method}` needs matplotlib, which is not installed: "
            "pip install 'jaxcoll[cli]'."
        ) from error


def _saved(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        with replacing(Path(path)) as partial:
            figure.savefig(partial, format=partial.suffix[1:] or "png")
    return figure
