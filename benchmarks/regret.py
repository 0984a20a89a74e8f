"""Measure how much longer jaxcoll's automatic choice takes than the best manual choice.

    python -m benchmarks.regret --json regret.jsonl

The cases are random trees over 2, 4 and 8 processes on one host or two, with or without a limited
network rate. Each case is written to the --json file as soon as it is measured; cases that are
already in the file are not measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.all_reduce import Contestant, parser_of
from benchmarks.lab import Network
from benchmarks.rank_pool import Team
from benchmarks.teams import on_hosts, on_this_host
from jaxcoll._show.table import Table
from jaxcoll.cli.bench import AGAIN, BASELINE, MOST_CALLS, SHORTEST, WARM, interleave
from jaxcoll.cli.flags import minimum

SECONDS = 8.0
"""Limit of the rounds of one case in seconds; at least `FEWEST` rounds are run."""
FEWEST = 4
HOPELESS = 4.0
"""A candidate is dropped if its last warm-up took over this many times as long as the fastest."""

AUTO = "auto"
TWIN = AUTO + AGAIN
MOST_BYTES, FEWEST_BYTES = 8 << 20, 4 << 10
MOST_LEAVES = 100
RATES = ("100mbit", "1gbit", "none")
PROCESSES = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree to reduce, and the processes that reduce it."""

    number: int  # index among the cases of its seed
    hosts: int  # 1 (over the loopback interface) or 2
    processes: int  # in total, with one CPU device each
    rate: str  # of the hosts' links, in `tc`'s syntax; "none" on one host
    elements: tuple[int, ...]  # number in each float32 leaf

    @property
    def nbytes(self) -> int:
        """The size of the tree in bytes."""
        return 4 * sum(self.elements)

    @property
    def world(self) -> tuple[int, int]:
        """The hosts and processes: equal for cases that the same processes can measure."""
        return self.hosts, self.processes

    def __str__(self) -> str:
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts, {self.rate}"
        arrays = f"{len(self.elements)} array{'s' * (len(self.elements) > 1)}"
        return f"{self.processes} processes, {where}: {self.nbytes / 1e6:.3g} MB in {arrays}"


def cases(count: int, seed: int) -> list[Case]:
    """Return the first `count` cases of a seed; a larger `count` only adds cases.

    Examples:
      >>> cases(3, seed=0) == cases(40, seed=0)[:3]
      True
    """
    return [_case(number, np.random.default_rng([seed, number])) for number in range(count)]


def _case(number: int, random: np.random.Generator) -> Case:
    hosts, processes = int(random.choice((1, 2))), int(random.choice(PROCESSES))
    rate = str(random.choice(RATES)) if hosts > 1 else "none"
    leaves = int(_between(random, 1, MOST_LEAVES))
    nbytes = _between(random, FEWEST_BYTES, MOST_BYTES)
    # Leaves of a model differ in size by orders of magnitude.
    shares = random.lognormal(sigma=2.0, size=leaves)
    elements = np.maximum(1, nbytes / 4 * shares / shares.sum()).astype(int)
    return Case(number, hosts, processes, rate, tuple(elements.tolist()))


def _between(random: np.random.Generator, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform between those of `low` and `high`."""
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def candidates(case: Case) -> tuple[str, ...]:
    """Return the manual choices, in the syntax of `jaxcoll bench --algorithms`."""
    packs = ("all",) if case.nbytes <= 1 << 20 or len(case.elements) == 1 else ("1MiB", "all")
    names = ["native", "halving_doubling"]
    if case.hosts > 1 and case.processes > case.hosts:
        names += ["shuffle/native", "shuffle/halving_doubling"]
    # A separate array takes as long as a small pack, so many of them cannot be the best choice.
    alone = (BASELINE,) if len(case.elements) <= 8 else ()
    return (*alone, *(f"{name}@{pack}" for name in names for pack in packs))


@dataclasses.dataclass(frozen=True)
class Regret:
    """The measurements of one case."""

    case: Case
    seconds: Mapping[str, tuple[float, ...]]  # of each contestant in each round
    # Candidates with the same plan as the automatic choice, which are not measured separately
    alike: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The candidate with the smallest median; "auto" if it has the automatic plan."""
        return self._best(slice(None))

    @property
    def ratio(self) -> float:
        """Seconds of the automatic choice divided by those of the best manual choice.

        The best is picked from every other round and compared in the remaining ones, then the other
        way round: the smallest of several medians over the same rounds would be biased. Candidates
        with the same plan, and the twin, are the same program.
        """
        halves = slice(0, None, 2), slice(1, None, 2)
        found = [
            self._median(AUTO, there) / self._median(self._best(here), there)
            for here, there in (halves, halves[::-1])
        ]
        return statistics.geometric_mean(found)

    @property
    def twin(self) -> float:
        """Seconds of the automatic choice divided by those of a second measurement of it."""
        return statistics.median(self.seconds[AUTO]) / statistics.median(self.seconds[TWIN])

    def _best(self, rounds: slice) -> str:
        by_hand = [name for name in self.seconds if name not in (AUTO, TWIN)]
        by_hand += [AUTO] * bool(self.alike)
        return min(by_hand, key=lambda name: self._median(name, rounds))

    def _median(self, name: str, rounds: slice) -> float:
        found = self.seconds[name][rounds]
        return statistics.median(found + self.seconds[TWIN][rounds] if name == AUTO else found)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for one JSON line."""
        figures = {"best": self.best, "ratio": self.ratio, "twin": self.twin}
        return {**dataclasses.asdict(self), **figures}


def regret_of(line: dict[str, Any]) -> Regret:
    """Return the `Regret` from which `to_dict` made `line`."""
    case = Case(**{**line["case"], "elements": tuple(line["case"]["elements"])})
    seconds = {name: tuple(rounds) for name, rounds in line["seconds"].items()}
    return Regret(case, seconds, tuple(line["alike"]))


def measure(wanted: Sequence[Case], rounds: int, timeout: float) -> Iterator[Regret]:
    """Measure cases; those of one world use the same processes.

    Yields:
      The result of each case, as soon as it is measured.

    Raises:
      LabUnavailableError: a case needs two hosts, which cannot be made here.
      LaunchError: a rank failed.
    """
    order = sorted(wanted, key=lambda case: (case.world, case.number))
    for world, alike in itertools.groupby(order, key=lambda case: case.world):
        with _ranks(*world, timeout) as (team, limit):
            for case in alike:
                limit(case.rate)
                yield _measured(case, team, rounds)


@contextlib.contextmanager
def _ranks(
    hosts: int, processes: int, timeout: float
) -> Iterator[tuple[Team, Callable[[str], None]]]:
    """Start processes on hosts; yields the team, and a function that limits the network rate."""
    entries = [(AUTO,)]
    if hosts == 1:
        with on_this_host(processes, entries, 1, timeout) as team:
            yield team, lambda rate: None
    else:
        network = Network(hosts, processes // hosts, "none")
        with on_hosts(network, entries, 1, timeout) as (team, lab):
            yield team, lab.limit


def _measured(case: Case, team: Team, rounds: int) -> Regret:
    leaves = [{"shape": (size,), "dtype": "float32"} for size in case.elements]
    team.do("prepare", leaves=leaves, reduce_op="mean")
    names = (AUTO, *candidates(case))
    plans = {name: team.do("plan", name=name)[0] for name in names}
    alike = tuple(name for name in plans if name != AUTO and plans[name] == plans[AUTO])
    names = (AUTO, TWIN, *(name for name in plans if name != AUTO and name not in alike))
    contestants = [Contestant(name, team) for name in names]
    for contestant in contestants:
        contestant.compile()
    for contestant in contestants * WARM:
        contestant.warm_up()
    fastest = min(c.warm_seconds for c in contestants)
    limit = HOPELESS * fastest
    turns = {c.name: c for c in contestants if c.name in (AUTO, TWIN) or c.warm_seconds <= limit}
    # The same number of calls for each, because the first call after a barrier is slower.
    for c in turns.values():
        c.calls = min(MOST_CALLS, math.ceil(SHORTEST / fastest))
    once = sum(c.warm_seconds * c.calls for c in turns.values())
    rounds = max(FEWEST, min(rounds, int(SECONDS / once)))
    calls = {name: lambda c=c: c.turn().seconds for name, c in turns.items()}
    found = list(interleave(calls, rounds))
    return Regret(case, {name: tuple(each[name] for each in found) for name in turns}, alike)


def summary(found: Sequence[Regret]) -> dict[str, float]:
    """Return the geometric mean and maximum of the ratios, and of the twins (slower ÷ faster)."""
    ratios, twins = [x.ratio for x in found], [x.twin for x in found]
    return {
        "cases": len(found),
        "mean": statistics.geometric_mean(ratios),
        "worst": max(ratios),
        "twin_mean": math.exp(statistics.fmean(abs(math.log(twin)) for twin in twins)),
        "twin_worst": max(max(twin, 1 / twin) for twin in twins),
    }


def text_of(found: Sequence[Regret]) -> str:
    """Return a table of the cases, the worst last, and their summary."""
    rows = [
        [str(x.case.number), str(x.case), x.best, f"{x.ratio:.2f}", f"{x.twin:.2f}"]
        for x in sorted(found, key=lambda x: x.ratio)
    ]
    table = Table(("case", "", "best by hand", "ratio", "again"), "><<>>", rows)
    total = summary(found)
    return (
        f"{table.text()}\n{total['cases']} cases: the automatic choice takes {total['mean']:.3f} "
        f"times as long as the best by hand (geometric mean), {total['worst']:.2f} times in the "
        f"worst case; measured again it differs by a factor of {total['twin_mean']:.3f} (geometric "
        f"mean), {total['twin_worst']:.2f} in the worst case."
    )


def main(argv: Sequence[str] | None = None) -> list[Regret]:
    """Measure the cases that no earlier run has, and print all; returns all cases."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--cases", type=minimum(1), default=40, help="number of cases (default: 40)")
    add("--seed", type=minimum(0), default=0, help="random seed (default: 0)")
    add("--rounds", type=minimum(FEWEST), default=20, help="maximum per case (default: 20)")
    add("--timeout", type=float, default=600, help="seconds that a request may take (default: 600)")
    add("--json", type=Path, metavar="FILE", help="one line per case; also read at the start")
    args = parser.parse_args(argv)
    text = args.json.read_text() if args.json and args.json.exists() else ""
    earlier = [regret_of(json.loads(line)) for line in text.splitlines()]
    wanted = cases(args.cases, args.seed)
    found = [regret for regret in earlier if regret.case in wanted]
    missing = [case for case in wanted if case not in [regret.case for regret in found]]
    for regret in measure(missing, args.rounds, args.timeout):
        found.append(regret)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(regret.to_dict()) + "\n")
    print(text_of(found))
    return found


if __name__ == "__main__":
    main()
