"""`jaxcoll bench --overlap N`: how much of an exchange in N programs a step has to wait for.

A backward pass on an accelerator leaves the host's cores alone, so it is a sleep here: after each
N-th of it one more part of the gradients is ready, and its reduction is dispatched. XLA's CPU
runtime runs what is dispatched beside the host, while within one program it waits for each
collective.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence

from jaxcoll.bench.naming import BASELINE
from jaxcoll.bench.rank_pool import Team
from jaxcoll.bench.table import wide_console
from jaxcoll.bench.terminal import new_table
from jaxcoll.bench.timing import Estimate, estimate, interleaved
from jaxcoll.bench.workloads import Workload
from jaxcoll.cli.bench_command import progress_of, teams_of
from jaxcoll.cli.flags import write_lines

WARM = 3


@dataclasses.dataclass(frozen=True)
class Overlapped:
    """One tree's overlap; seconds are those of the slowest rank.

    Attributes:
      workload: name of the tree.
      bytes: of the tree.
      processes: that exchange it.
      parts: programs that reduce it.
      algorithm: of all of them, as on the command line.
      communication: seconds of the programs alone, one dispatched right after the other.
      compute: seconds of the sleeps alone, asked to be as long.
      step: seconds of both.
      exposed: (step - compute) / communication, by rounds.
      twin: communication over itself, measured again in the same rounds.
    """

    workload: str
    bytes: int
    processes: int
    parts: int
    algorithm: str
    communication: Estimate
    compute: Estimate
    step: Estimate
    exposed: Estimate
    twin: Estimate


def run(args: argparse.Namespace, workloads: list[Workload], algorithm: str) -> None:
    """What of an exchange in several programs a step waits for."""
    if args.overlap < 1:
        raise ValueError(f"--overlap must be at least 1 program; got {args.overlap}.")
    for flag in ("against", "plot", "sizes"):
        if getattr(args, flag):
            raise ValueError(f"--overlap measures trees, beside themselves: leave --{flag} out.")
    found = []
    with teams_of(args, [(BASELINE,)]) as (teams, is_first):
        steps = len(workloads) * (args.overlap + WARM + args.rounds + 1)
        with progress_of(steps, shown=is_first) as progress:
            for workload in workloads:
                found.append(
                    measure(
                        workload,
                        teams[0],
                        parts=args.overlap,
                        algorithm=algorithm,
                        rounds=args.rounds,
                        progress=lambda words, name=workload.name: progress(f"{name}: {words}"),
                    )
                )
    if is_first:
        write_lines(args.json, "".join(json.dumps(dataclasses.asdict(x)) + "\n" for x in found))
        _show(found, to_stderr=args.json == "-")


def parts_of(workload: Workload, count: int) -> list[tuple[int, int]]:
    """Ranges of neighbouring leaves, at most `count`, of sizes as even as undivided leaves allow.

    Examples:
      >>> import jax
      >>> leaves = tuple(jax.ShapeDtypeStruct((n,), "float32") for n in (4, 1, 1, 2, 8))
      >>> parts_of(Workload("tree", leaves), 3)
      [(0, 2), (2, 4), (4, 5)]
    """
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in workload.leaves]
    total, seen, stops = sum(sizes), 0, [0]
    for k, size in enumerate(sizes):
        if seen + size / 2 > total * len(stops) / count and k > stops[-1]:
            stops.append(k)
        seen += size
    return list(zip(stops, [*stops[1:], len(sizes)], strict=True))


def measure(
    workload: Workload,
    team: Team,
    *,
    parts: int,
    algorithm: str,
    rounds: int,
    progress: Callable[[str], None],
) -> Overlapped:
    """Measure the exchange of one tree by `parts` programs.

    `progress` gets words for what is being done, at most `parts + WARM + rounds + 1` times.
    """
    progress("values")
    leaves = [{"shape": x.shape, "dtype": x.dtype.name} for x in workload.leaves]
    team.do("prepare", leaves=leaves, reduce_op="mean")
    names = []
    for first, stop in parts_of(workload, parts):
        names.append(f"leaves {first} to {stop - 1}")
        progress(f"build {names[-1]}")
        team.do("build", name=names[-1], algorithm=algorithm, first=first, stop=stop)

    def seconds(compute: float, *, send: bool = True) -> float:
        return max(team.do("pipelined", names=names, compute=compute, send=send))

    slept = 0.0
    # The last warm-up is the first estimate of how long a step should compute.
    for _ in range(WARM):
        progress("warm up")
        slept = seconds(0.0)
    turns = {
        "communication": lambda: seconds(0.0),
        # A sleep takes longer than asked, so what it takes alone is measured as well.
        "compute": lambda: seconds(slept, send=False),
        "step": lambda: seconds(slept),
        "twin": lambda: seconds(0.0),
    }
    found = []
    for measured in interleaved(turns, rounds):
        progress(f"measure, round {len(found) + 1} of {rounds}")
        found.append(measured)
        slept = measured["communication"]  # a step that computes for as long as it communicates
    of = {name: [measured[name] for measured in found] for name in turns}
    waited = [step - compute for step, compute in zip(of["step"], of["compute"], strict=True)]
    return Overlapped(
        workload=workload.name,
        bytes=workload.nbytes,
        processes=team.world["processes"],
        parts=len(names),
        algorithm=algorithm,
        communication=estimate(of["communication"]),
        compute=estimate(of["compute"]),
        step=estimate(of["step"]),
        exposed=_share(waited, of["communication"]),
        twin=_share(of["twin"], of["communication"]),
    )


def _share(part: Sequence[float], total: Sequence[float]) -> Estimate:
    return estimate([a / b for a, b in zip(part, total, strict=True)])


def _show(found: Sequence[Overlapped], *, to_stderr: bool) -> None:
    """Print a row for each tree of `--overlap`."""
    console = wide_console(to_stderr=to_stderr)
    table = new_table(
        ("tree", "MB", "programs", "communication ms", "compute ms", "step ms", "exposed", "A/A"),
        "<>>>>>>>",
        f"overlap over {found[0].processes} processes, by {found[0].algorithm}: "
        "medians [95 %], compute is a sleep",
    )
    for each in found:
        times = (each.communication, each.compute, each.step)
        milliseconds = [f"{x.median * 1e3:,.0f}" for x in times]
        cells = [each.workload, f"{each.bytes / 1e6:,.1f}", str(each.parts), *milliseconds]
        table.add_row(*cells, str(each.exposed), str(each.twin))
    console.print(table)
    console.print("[dim]exposed: (step - compute) ÷ communication, paired by round[/]")
