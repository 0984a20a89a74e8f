"""Measure how much of an exchange a step waits for, if several programs make the exchange.

    python -m benchmarks.overlap --processes 4 --tree resnet50 --parts 8

A backward pass on an accelerator does not use the host's cores, so a sleep stands for it. After
each N-th of the sleep one more part of the gradients is ready, and its reduction is dispatched.
XLA's CPU runtime runs dispatched programs concurrently with the host, but within one program it
waits for each collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.all_reduce import Workload, parser_of, workloads_of
from benchmarks.rank_pool import Team
from benchmarks.teams import add_world, team_of
from jaxcoll._show.table import Table
from jaxcoll.cli import flags
from jaxcoll.cli.bench import BASELINE, Estimate, estimate, interleave, ratio

WARM = 3


@dataclasses.dataclass(frozen=True)
class Overlapped:
    """The overlap of one tree; seconds are of the slowest rank."""

    workload: str
    bytes: int
    processes: int
    parts: int  # number of programs that reduce it
    algorithm: str
    communication: Estimate  # seconds of the programs alone, dispatched back to back
    compute: Estimate  # seconds of the sleeps alone, meant to take as long as communication
    step: Estimate  # seconds of both
    exposed: Estimate  # (step - compute) / communication, paired by round
    twin: Estimate  # communication, measured again in the same rounds, over communication


def parts_of(workload: Workload, count: int) -> list[tuple[int, int]]:
    """Split the leaves into at most `count` consecutive ranges of similar sizes in bytes.

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
    workload: Workload, team: Team, *, parts: int, algorithm: str, rounds: int
) -> Overlapped:
    """Measure the exchange of one tree by at most `parts` programs."""
    workload.prepare(team, "mean")
    names = []
    for first, stop in parts_of(workload, parts):
        names.append(f"leaves {first} to {stop - 1}")
        team.do("build", name=names[-1], algorithm=algorithm, first=first, stop=stop)

    def seconds(compute: float, *, send: bool = True) -> float:
        return max(team.do("pipelined", names=names, compute=compute, send=send))

    # The last warm-up is the first estimate of how long a step should compute.
    slept = [seconds(0.0) for _ in range(WARM)][-1]
    turns = {
        "communication": lambda: seconds(0.0),
        # A sleep takes longer than requested, so it is measured alone as well.
        "compute": lambda: seconds(slept, send=False),
        "step": lambda: seconds(slept),
        "twin": lambda: seconds(0.0),
    }
    timed = []
    for measured in interleave(turns, rounds):
        timed.append(measured)
        slept = measured["communication"]  # next, compute for as long as communication took
    by_name = {name: [measured[name] for measured in timed] for name in turns}
    waits = [s - c for s, c in zip(by_name["step"], by_name["compute"], strict=True)]
    return Overlapped(
        workload=workload.name,
        bytes=workload.nbytes,
        processes=team.world["processes"],
        parts=len(names),
        algorithm=algorithm,
        communication=estimate(by_name["communication"]),
        compute=estimate(by_name["compute"]),
        step=estimate(by_name["step"]),
        exposed=ratio(waits, by_name["communication"]),
        twin=ratio(by_name["twin"], by_name["communication"]),
    )


def text_of(results: Sequence[Overlapped]) -> str:
    """Return a table with a row for each tree."""
    columns = ("tree", "MB", "programs", "communication ms", "compute ms", "step ms", "exposed",
               "again")  # fmt: skip
    rows = [
        [
            x.workload, f"{x.bytes / 1e6:,.1f}", str(x.parts),
            *(f"{t.median * 1e3:,.0f}" for t in (x.communication, x.compute, x.step)),
            str(x.exposed), str(x.twin),
        ]
        for x in results
    ]  # fmt: skip
    return (
        f"{results[0].processes} processes, {results[0].algorithm}; exposed: (step - compute) ÷ "
        f"communication, paired by round\n{Table(columns, '<>>>>>>>', rows).text()}"
    )


def main(argv: Sequence[str] | None = None) -> list[Overlapped]:
    """Measure, print and write the results; returns one for each tree."""
    parser = parser_of(__doc__)
    flags.add_tree(parser, action="append", default=[])
    add_world(parser)
    add = parser.add_argument
    add(
        "--parts",
        type=flags.minimum(1),
        default=8,
        metavar="N",
        help="number of programs (default: 8)",
    )
    add("--algorithm", default="auto", metavar="NAME", help="as for jaxcoll bench (default: auto)")
    add("--rounds", type=flags.minimum(1), default=20, help="timed rounds (default: 20)")
    add("--json", metavar="FILE", help="write one JSON line per tree")
    args = parser.parse_args(argv)
    how = {"parts": args.parts, "algorithm": args.algorithm, "rounds": args.rounds}
    with team_of(args, [(BASELINE,)]) as team:
        results = [measure(workload, team, **how) for workload in workloads_of(args)]
    flags.write_json(args.json, [dataclasses.asdict(x) for x in results], as_lines=True)
    print(text_of(results))
    return results


if __name__ == "__main__":
    main()
