"""What the constants of the cost model are on this machine, measured.

    python -m benchmarks.calibrate --processes 4
    python -m benchmarks.calibrate --rate 1gbit --hosts 2

It measures JAX's own all-reduce of seven sizes, 16 small arrays in one program, two kinds of packs,
and our own exchange of three sizes, about ten seconds in all, and derives what one more array,
one byte that is copied, one leaf in a pack, one step and one byte of an exchange take. In the end
it compares predicted and measured seconds of trees of which nothing was measured before.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from benchmarks.all_reduce import Contestant, Workload, parser_of, world_of
from benchmarks.rank_pool import Team
from benchmarks.teams import add_world, team_of
from jaxcoll._plan.algorithms import exchange
from jaxcoll._show.table import Table
from jaxcoll._show.units import milliseconds
from jaxcoll.cli import flags
from jaxcoll.cli.bench import BASELINE, WARM, interleaved, spelled

KiB, MiB = 1 << 10, 1 << 20
SIZES = (KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB)
EXCHANGED = (KiB, MiB, 16 * MiB)
ARRAYS = 16
"""Arrays of the smallest size that one program reduces."""
PACKS = ((8, 2 * MiB), (256, KiB))
"""Arrays and bytes of each, copied into one."""
SECONDS, FEWEST, MOST = 8.0, 3, 40
"""What measuring may take, and its rounds: fewer give no median, more find nothing new."""
HELD_OUT = ("resnet50", "200x1KiB")


@dataclasses.dataclass(frozen=True)
class Probe:
    """One program to measure: the sum of `count` arrays of `nbytes` each."""

    algorithm: str  # as on the command line
    count: int
    nbytes: int


def probes_of(replicas: int, sizes: Sequence[int], exchanged: Sequence[int]) -> list[Probe]:
    """All programs to measure, each once."""
    own = f"{exchange(replicas)}@all"
    return [
        *(Probe(BASELINE, 1, size) for size in sizes),
        Probe(BASELINE, ARRAYS, sizes[0]),
        *(Probe("native@all", *pack) for pack in PACKS),
        *(Probe("native@all", 1, count * size) for count, size in PACKS),
        *(Probe(own, 1, size) for size in exchanged),
    ]


def constants_of(seconds: Mapping[Probe, float], replicas: int) -> dict[str, float]:
    """What follows from the seconds of `probes_of`; in seconds, and seconds per byte.

    Two packs give two equations: time beyond one array = bytes × per byte + leaves × per leaf. A
    byte is copied twice, in and out. An exchange has a number of steps, and 2(n-1)/n of its bytes
    travel, one half of which is added up.
    """
    smallest = min(p.nbytes for p in seconds if p.algorithm == BASELINE)
    one, many = (seconds[Probe(BASELINE, count, smallest)] for count in (1, ARRAYS))
    beyond = [
        seconds[Probe("native@all", count, size)] - seconds[Probe("native@all", 1, count * size)]
        for count, size in PACKS
    ]
    equations = np.array([[2.0 * count * size, count] for count, size in PACKS])
    copy, leaf = np.maximum(np.linalg.solve(equations, beyond), 0.0).tolist()
    own = sorted((p.nbytes, s) for p, s in seconds.items() if not p.algorithm.startswith(
        (BASELINE, "native")))  # fmt: skip
    slope, first = np.polyfit(*np.array(own).T, 1)
    return {
        "array beyond the first": max(0.0, (many - one) / (ARRAYS - 1)),
        "copy of a byte": copy,
        "leaf in a pack": leaf,
        "step of an exchange": max(0.0, first) / (2 * np.ceil(np.log2(replicas))),
        "byte of an exchange": slope / (2 * (replicas - 1) / replicas),
    }


def measured(team: Team, probes: Sequence[Probe], allowed: float) -> tuple[dict[Probe, float], int]:
    """Median seconds of every probe, and of how many rounds."""
    leaves = [
        jax.ShapeDtypeStruct((probe.nbytes // 4,), "float32")
        for probe in probes
        for _ in range(probe.count)
    ]
    Workload("probes", tuple(leaves)).prepare(team, "sum")
    turns: dict[str, Contestant] = {}
    stops = itertools.accumulate(probe.count for probe in probes)
    for k, (probe, stop) in enumerate(zip(probes, stops, strict=True)):
        part = {"first": stop - probe.count, "stop": stop}
        team.do("build", name=str(k), algorithm=probe.algorithm, **part)
        turns[str(k)] = Contestant(str(k), team)
    for _ in range(WARM):
        for c in turns.values():
            c.warm_up()
    # As many rounds as fit into the time, because worlds differ much in speed.
    once = sum(c.warm * c.calls for c in turns.values())
    rounds = min(MOST, max(FEWEST, int(allowed / once)))
    calls = {name: lambda c=c: c.turn().seconds for name, c in turns.items()}
    timed = list(interleaved(calls, rounds))
    medians = [statistics.median(found[str(k)] for found in timed) for k in range(len(probes))]
    return dict(zip(probes, medians, strict=True)), rounds


def held_out(team: Team, tree: str) -> dict[str, float]:
    """Seconds of a tree's automatic reduction, predicted and measured."""
    leaves = flags.tree_of(tree, "float32").values()
    Workload(tree, tuple(leaves)).prepare(team, "sum")
    contestant = Contestant("auto", team)
    contestant.compile()
    contestant.warm_up()
    seconds = statistics.median(contestant.turn().seconds for _ in range(5))
    return {"predicted": team.do("plan", name="auto")[0]["seconds"], "measured": seconds}


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    """Measure, show and write; returns what was found."""
    parser = parser_of(__doc__)
    add_world(parser)
    add = parser.add_argument
    add("--most", type=flags.bytes_of, default=64 * MiB, metavar="SIZE", help="largest array")
    add("--trees", default=",".join(HELD_OUT), help="to predict and measure")
    add("--seconds", type=float, default=SECONDS, help=f"of measuring (default: {SECONDS:g})")
    add("--json", metavar="FILE", help="write what was found to FILE")
    args = parser.parse_args(argv)
    with team_of(args, [(BASELINE,)]) as team:
        sizes, exchanged = ([s for s in few if s <= args.most] for few in (SIZES, EXCHANGED))
        probes = probes_of(team.world["devices"], sizes, exchanged)
        seconds, rounds = measured(team, probes, args.seconds)
        trees = {tree: held_out(team, tree) for tree in args.trees.split(",")}
        where = world_of({**team.world, "network": team.network})
    constants = constants_of(seconds, team.world["devices"])
    rows = [[p.algorithm, str(p.count), spelled(p.nbytes), milliseconds(s)]
            for p, s in seconds.items()]  # fmt: skip
    print(f"{where}: medians of {rounds} rounds")
    print(Table(("program", "arrays", "of", "time"), "<>>>", rows).text(), end="\n\n")
    for name, value in constants.items():
        per_byte = "byte" in name
        print(f"{name}: {value * (1e9 if per_byte else 1e6):.3g} {'ns' if per_byte else 'µs'}")
    for tree, found in trees.items():
        print(f"{tree} by auto: " + ", ".join(f"{k} {milliseconds(s)}" for k, s in found.items()))
    results = {
        "world": where, "rounds": rounds, "constants": constants, "trees": trees,
        "seconds": [{**dataclasses.asdict(p), "seconds": s} for p, s in seconds.items()],
    }  # fmt: skip
    flags.write_json(args.json, results)
    return results


if __name__ == "__main__":
    main()
