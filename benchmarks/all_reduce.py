r"""Compare jaxcoll's all-reduces with other libraries', on this host or over a slow network.

python -m benchmarks.all_reduce --processes 4 --tree resnet50 --against torch \
        --torch-python ~/torch/bin/python --plot bench.png --json bench.jsonl
python -m benchmarks.all_reduce --rate 100mbit --hosts 2 --per-host 2 \
        --tree docs/examples/third.json --reduce-op sum --algorithms auto,auto+int8
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from benchmarks.rank_pool import Entry, Team
from benchmarks.teams import PEERS, add_world, jax_alone, peer, team_of
from jaxcoll._show.table import Table
from jaxcoll._show.units import scale
from jaxcoll.cli import flags
from jaxcoll.cli.bench import (
    AGAIN,
    BASELINE,
    MOST_CALLS,
    SHORTEST,
    WARM,
    Estimate,
    estimate,
    interleave,
    parse_sizes,
    ratio,
)  # fmt: skip

COMPILES, TRIALS = 3, 3


@dataclasses.dataclass(frozen=True)
class Workload:
    """A tree or an array to reduce."""

    name: str  # the tree's name, or the array's size
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes and dtypes on one replica
    is_size: bool = False  # from --sizes, rather than a tree

    @property
    def nbytes(self) -> int:
        """Bytes on one replica."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.leaves)

    def prepare(self, team: Team, reduce_op: str) -> None:
        """Make every rank of a team create the values."""
        # Sent as plain Python values, because other interpreters may not have JAX.
        leaves = [{"shape": tuple(x.shape), "dtype": x.dtype.name} for x in self.leaves]
        team.do("prepare", leaves=leaves, reduce_op=reduce_op)


@dataclasses.dataclass(frozen=True)
class Round:
    """The figures of one contestant in one round, per call."""

    seconds: float
    cpu_seconds: float
    socket_bytes: float


@dataclasses.dataclass
class Contestant:
    """One way to reduce the workload, and its measurements so far."""

    name: str  # understood by its team
    team: Team  # the ranks that run it
    # Seconds on the slowest rank, for each compilation
    compile_seconds: list[float] = dataclasses.field(default_factory=list)
    # From `Rank.describe`; `error` is the largest over the ranks
    description: dict[str, Any] = dataclasses.field(default_factory=dict)
    warm_seconds: float = 0.0  # of the last warm-up call
    calls: int = 1  # per round
    rounds: list[Round] = dataclasses.field(default_factory=list)

    def compile(self) -> float | None:
        """Compile it, and return seconds on the slowest rank, or None if nothing is compiled."""
        seconds = self.team.do("compile", name=self.name)
        return None if None in seconds else max(seconds)

    def warm_up(self) -> None:
        """Run it once without recording, and set the number of calls per round."""
        self.calls = 1
        self.warm_seconds = self.turn().seconds
        self.calls = min(MOST_CALLS, math.ceil(SHORTEST / self.warm_seconds))

    def turn(self) -> Round:
        """Run it `calls` times."""
        before = self.team.sent_bytes() or 0
        ranks = self.team.do("time", name=self.name, calls=self.calls)
        sent = (self.team.sent_bytes() or 0) - before - self.team.barrier_bytes
        return Round(
            seconds=max(x["seconds"] for x in ranks) / self.calls,
            cpu_seconds=sum(x["cpu_seconds"] for x in ranks) / self.calls,
            socket_bytes=max(0.0, sent) / self.calls,
        )

    def values(self, field: str) -> list[float]:
        """Return one figure of every round."""
        return [getattr(measured, field) for measured in self.rounds]


def measure(
    workload: Workload, teams: Sequence[Team], *, reduce_op: str, rounds: int
) -> list[dict[str, Any]]:
    """Measure all entries of all teams on one workload; only one team works at a time.

    The first team has the baseline. `WARM` warm-up rounds come before the `rounds` timed ones.

    Returns:
      A dictionary for each contestant (README.md lists its fields).
    """
    for team in teams:
        workload.prepare(team, reduce_op)
    chosen = {c.name: c for team in teams for c in _shortlist(workload, team)}
    for compiled in interleave(_turns(chosen, Contestant.compile), COMPILES):
        for name, seconds in compiled.items():
            if seconds is not None:
                chosen[name].compile_seconds.append(seconds)
    for c in chosen.values():
        descriptions = c.team.do("describe", name=c.name)
        c.description = {**descriptions[0], "error": max(x["error"] for x in descriptions)}
    for _ in range(WARM):
        for c in chosen.values():
            c.warm_up()
    for team in teams:
        team.barrier_bytes = _barrier_bytes(team)
    for measured in interleave(_turns(chosen, Contestant.turn), rounds):
        for name, values in measured.items():
            chosen[name].rounds.append(values)
    return [_line(workload, reduce_op, c, chosen[BASELINE]) for c in chosen.values()]


T = TypeVar("T")


def _turns(
    chosen: Mapping[str, Contestant], turn: Callable[[Contestant], T]
) -> dict[str, Callable[[], T]]:
    return {c.name: lambda c=c: turn(c) for c in chosen.values()}


def _line(workload: Workload, reduce_op: str, c: Contestant, base: Contestant) -> dict[str, Any]:
    """Summarize all rounds of a contestant."""
    seconds, n = estimate(c.values("seconds")), c.team.world["devices"]
    algbw = workload.nbytes / seconds.median / 1e9
    # Other traffic only adds bytes, so the minimum is the best estimate.
    sent = None if c.team.sent_bytes() is None else min(c.values("socket_bytes")) / n
    built = c.compile_seconds
    return {
        "workload": workload.name,
        "is_size": workload.is_size,
        "algorithm": c.name,
        **{name: c.team.world[name] for name in ("library", "device", "devices", "processes")},
        "network": c.team.network,
        "reduce_op": reduce_op,
        "leaves": len(workload.leaves),
        "bytes": workload.nbytes,
        "rounds": len(c.rounds),
        "calls": c.calls,
        "seconds": dataclasses.asdict(seconds),
        "ratio": dataclasses.asdict(ratio(c.values("seconds"), base.values("seconds"))),
        "algbw": algbw,
        "busbw": algbw * 2 * (n - 1) / n,
        "cpu_seconds": float(np.median(c.values("cpu_seconds"))),
        "wire_bytes": c.description.get("wire_bytes"),
        "socket_bytes": sent,
        "operands": c.description.get("operands"),
        "compile_seconds": float(np.median(built)) if built else None,
        "compile_ratio": ratio(built, base.compile_seconds).median if built else None,
        "error": c.description["error"],
    }


def _shortlist(workload: Workload, team: Team) -> Iterator[Contestant]:
    """Yield the contestants; an entry of several yields the one that is fastest in a few trials."""
    # Measuring all of them in every round would take too long.
    for entry in team.entries:
        those = {name: Contestant(name, team) for name in entry}
        if len(those) == 1:
            yield from those.values()
        elif len(workload.leaves) > 1:  # they differ only in packing, which one array does not need
            trials = list(interleave(_turns(those, Contestant.turn), TRIALS))
            yield those[min(entry, key=lambda n: np.median([t[n].seconds for t in trials]))]


def _barrier_bytes(team: Team) -> float:
    """Return the bytes that a barrier sends."""

    def sent() -> float:
        before = team.sent_bytes() or 0
        team.do("time", name="", calls=0)
        return (team.sent_bytes() or 0) - before

    return float(np.median([sent() for _ in range(3)]))


def text_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines as a table, under a heading that names the ranks."""
    columns = ("", "algorithm", "ms", f"÷ {BASELINE} [95 %]", "busbw", "CPU ms", "sent", "kernel",
               "arrays", "error", "build s", "÷")  # fmt: skip
    rows = [
        [
            line["workload"], line["algorithm"], f"{line['seconds']['median'] * 1e3:.3g}",
            str(Estimate(**line["ratio"])), f"{line['busbw']:.3g}",
            f"{line['cpu_seconds'] * 1e3:.3g}", _bytes(line["wire_bytes"]),
            _bytes(line["socket_bytes"]), str(line["operands"] or "–"), f"{line['error']:.1e}",
            *("–" if line[name] is None else f"{line[name]:.2f}"
              for name in ("compile_seconds", "compile_ratio")),
        ]
        for line in lines
    ]  # fmt: skip
    first = lines[0]
    return (
        f"{first['reduce_op']} over {world_of(first)}, medians of {first['rounds']} rounds\n"
        + Table(columns, "<<>>>>>>>>>>", rows).text()
    )


def world_of(line: Mapping[str, Any]) -> str:
    """Describe the ranks of a line."""
    n, processes = line["devices"], line["processes"]
    on = f" on {line['network']}" * bool(line["network"])
    return f"{processes} processes × {n // processes} {line['device']} devices{on}"


def _bytes(nbytes: float | None) -> str:
    return "–" if nbytes is None else f"{scale(round(nbytes))}B"


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads of --tree, --sizes and --dtype."""
    sizes = getattr(args, "sizes", None)
    trees = args.tree or ([] if sizes else ["resnet50"])
    workloads = [Workload(n, tuple(flags.read_tree(n, args.dtype).values())) for n in trees]
    dtype = flags.parse_dtype(args.dtype)
    for name, size in parse_sizes(sizes).items() if sizes else ():
        leaf = jax.ShapeDtypeStruct((size // dtype.itemsize,), dtype)
        workloads.append(Workload(name, (leaf,), is_size=True))
    return workloads


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with a module's docstring in its help."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=how)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and write the results; returns one dictionary per contestant."""
    parser = parser_of(__doc__)
    flags.add_tree(parser, action="append", default=[])
    add = parser.add_argument
    add("--sizes", metavar="RANGE", help="sizes of arrays, as for jaxcoll bench")
    add("--algorithms", default="auto", metavar="LIST", help="as for jaxcoll bench (default: auto)")
    add("--rounds", type=flags.minimum(1), default=20, help="timed rounds (default: 20)")
    add_world(parser)
    words = (
        "torch (torch.distributed over Gloo, in place), tensorflow (RING), or jax (one psum per "
    )
    words += "leaf in processes that jaxcoll did not set up); not with --rate"
    add("--against", choices=("jax", *PEERS), action="append", default=[], help=words)
    for name in PEERS:
        add(f"--{name}-python", metavar="PATH", help=f"Python with {name} (default: this one)")
    add("--json", metavar="FILE", help="one JSON line per result; - for standard output")
    add("--plot", type=Path, metavar="FILE.png", help="plot the results")
    args = parser.parse_args(argv)
    names = dict.fromkeys([BASELINE, BASELINE + AGAIN, *args.algorithms.split(",")])
    entries: list[Entry] = [(name,) for name in names]
    if args.against and (args.rate or args.devices > 1):
        parser.error("--against needs processes of one device each on this host.")
    lines = []
    with contextlib.ExitStack() as stack:
        teams = [stack.enter_context(team_of(args, entries))]
        for name in args.against:
            if name == "jax":
                teams.append(stack.enter_context(jax_alone(args.processes, args.timeout)))
                continue
            python = getattr(args, f"{name}_python")
            teams.append(stack.enter_context(peer(name, python, args.processes, args.timeout)))
        for workload in workloads_of(args):
            print(f"measuring {workload.name} …", file=sys.stderr, flush=True)
            lines += measure(workload, teams, reduce_op=args.reduce_op, rounds=args.rounds)
    flags.write_json(args.json, lines, as_lines=True)
    if args.plot is not None:
        from benchmarks.chart import draw

        draw(lines, args.plot)
    print(text_of(lines), file=sys.stderr if args.json == "-" else sys.stdout)
    return lines


if __name__ == "__main__":
    main()
