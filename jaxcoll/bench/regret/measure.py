"""Measure the automatic choice beside the candidates, case by case."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxcoll.bench import targets
from jaxcoll.bench.all_reduce import MOST_CALLS, SHORTEST, WARM, Contestant
from jaxcoll.bench.lab.namespaces import Network
from jaxcoll.bench.naming import AGAIN
from jaxcoll.bench.rank_pool import Team
from jaxcoll.bench.regret.cases import Case, candidates
from jaxcoll.bench.timing import interleaved

SECONDS = 8.0
"""That the rounds of one case may take, beyond the fewest."""
FEWEST = 4
HOPELESS = 4.0
"""Times as long as the fastest that a candidate may take in its last warm-up, to be measured."""

AUTO = "auto"
TWIN = AUTO + AGAIN


@dataclasses.dataclass(frozen=True)
class Regret:
    """What one case showed.

    Attributes:
      case: it.
      seconds: for each contestant, those of each round.
      alike: candidates with the plan of the automatic choice, which were not measured again.
    """

    case: Case
    seconds: Mapping[str, tuple[float, ...]]
    alike: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The candidate with the least median; one with the automatic plan as "auto"."""
        return self._best(slice(None))

    @property
    def ratio(self) -> float:
        """Seconds of the automatic choice over those of the best by hand.

        The best is picked in every other round and compared in the rounds between, in turn: the
        least of several medians of the same rounds would be too small by chance. A candidate of the
        same plan is the same program, and so is the twin.
        """
        halves = slice(0, None, 2), slice(1, None, 2)
        found = [
            self._median(AUTO, there) / self._median(self._best(here), there)
            for here, there in (halves, halves[::-1])
        ]
        return statistics.geometric_mean(found)

    @property
    def twin(self) -> float:
        """Seconds of the automatic choice over its own, measured as another contestant."""
        return statistics.median(self.seconds[AUTO]) / statistics.median(self.seconds[TWIN])

    def _best(self, rounds: slice) -> str:
        by_hand = [name for name in self.seconds if name not in (AUTO, TWIN)]
        by_hand += [AUTO] * bool(self.alike)
        return min(by_hand, key=lambda name: self._median(name, rounds))

    def _median(self, name: str, rounds: slice) -> float:
        found = self.seconds[name][rounds]
        return statistics.median(found + self.seconds[TWIN][rounds] if name == AUTO else found)

    def to_dict(self) -> dict[str, Any]:
        """One JSON line."""
        figures = {"best": self.best, "ratio": self.ratio, "twin": self.twin}
        return {**dataclasses.asdict(self), **figures}


def regret_of(line: dict[str, Any]) -> Regret:
    """The value that `Regret.to_dict` gave."""
    case = Case(**{**line["case"], "elements": tuple(line["case"]["elements"])})
    seconds = {name: tuple(rounds) for name, rounds in line["seconds"].items()}
    return Regret(case, seconds, tuple(line["alike"]))


def measure(
    wanted: Sequence[Case], rounds: int, timeout: float, progress: Callable[[str], None]
) -> Iterator[Regret]:
    """Measure cases, those of one world with the same processes.

    Yields:
      What each showed, as soon as it is known.

    Raises:
      LabUnavailableError: a case has two hosts, which cannot be made here.
      LaunchError: a rank failed.
    """
    order = sorted(wanted, key=lambda case: (case.world, case.number))
    for world, alike in itertools.groupby(order, key=lambda case: case.world):
        with _ranks(*world, timeout) as (team, limit):
            for case in alike:
                progress(str(case))
                limit(case.rate)
                yield _measured(case, team, rounds)


@contextlib.contextmanager
def _ranks(
    hosts: int, processes: int, timeout: float
) -> Iterator[tuple[Team, Callable[[str], None]]]:
    """Processes on hosts, and what sets the rate between these."""
    entries = [(AUTO,)]
    if hosts == 1:
        with targets.teams_of(entries, processes=processes, timeout=timeout) as (team,):
            yield team, lambda rate: None
    else:
        network = Network(hosts, processes // hosts, "none")
        with targets.on_hosts(network, entries, 1, timeout) as (team, lab):
            yield team, lab.limit


def _measured(case: Case, team: Team, rounds: int) -> Regret:
    leaves = [{"shape": (size,), "dtype": "float32"} for size in case.elements]
    team.do("prepare", leaves=leaves, reduce_op="mean")
    plans = {name: team.do("plan", name=name)[0] for name in (AUTO, *candidates(case))}
    alike = tuple(name for name in plans if name != AUTO and plans[name] == plans[AUTO])
    names = (AUTO, TWIN, *(name for name in plans if name != AUTO and name not in alike))
    contestants = [Contestant(name, team) for name in names]
    for contestant in contestants:
        contestant.compile()
    for contestant in contestants * WARM:
        contestant.warm_up()
    fastest = min(c.warm for c in contestants)
    turns = {
        c.name: c for c in contestants if c.name in (AUTO, TWIN) or c.warm <= HOPELESS * fastest
    }
    # As many calls for each: the first after a barrier takes longer than those that follow.
    for c in turns.values():
        c.calls = min(MOST_CALLS, math.ceil(SHORTEST / fastest))
    once = sum(c.warm * c.calls for c in turns.values())
    rounds = max(FEWEST, min(rounds, int(SECONDS / once)))
    calls = {name: lambda c=c: c.turn().seconds for name, c in turns.items()}
    found = list(interleaved(calls, rounds))
    return Regret(case, {name: tuple(each[name] for each in found) for name in turns}, alike)


def summary(found: Sequence[Regret]) -> dict[str, float]:
    """Geometric mean and worst of the ratios, and of the twins', whichever is the slower of two."""
    ratios, twins = [x.ratio for x in found], [x.twin for x in found]
    return {
        "cases": len(found),
        "mean": statistics.geometric_mean(ratios),
        "worst": max(ratios),
        "twin_mean": math.exp(statistics.fmean(abs(math.log(twin)) for twin in twins)),
        "twin_worst": max(max(twin, 1 / twin) for twin in twins),
    }
