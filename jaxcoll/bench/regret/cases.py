"""Random trees in random worlds, for each of which a choice has to be made."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxcoll.bench.naming import BASELINE

MOST_BYTES, FEWEST_BYTES = 8 << 20, 4 << 10
MOST_LEAVES = 100
RATES = ("100mbit", "1gbit", "none")
PROCESSES = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """One tree in one world.

    Attributes:
      number: among those of its seed.
      hosts: 1, whose loopback interface carries everything, or 2.
      processes: on all of them, of one CPU device each.
      rate: of the hosts' links, as `tc` spells it; "none" on one host.
      elements: of each leaf, of float32.
    """

    number: int
    hosts: int
    processes: int
    rate: str
    elements: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return 4 * sum(self.elements)

    @property
    def world(self) -> tuple[int, int]:
        """What cases must share to be measured by the same processes."""
        return self.hosts, self.processes

    def __str__(self) -> str:
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts, {self.rate}"
        arrays = f"{len(self.elements)} array{'s' * (len(self.elements) > 1)}"
        return f"{self.processes} processes, {where}: {self.nbytes / 1e6:.3g} MB in {arrays}"


def cases(count: int, seed: int) -> list[Case]:
    """The first `count` cases of a seed.

    Law: with more cases the first ones stay as they are.

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
    """A number whose logarithm is as likely anywhere between the two."""
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def candidates(case: Case) -> tuple[str, ...]:
    """What a user could ask for by hand, as `jaxcoll bench --algorithms` spells it."""
    packs = ("all",) if case.nbytes <= 1 << 20 or len(case.elements) == 1 else ("1MiB", "all")
    names = ["native", "halving-doubling"]
    if case.hosts > 1 and case.processes > case.hosts:
        names += ["shuffle/native", "shuffle/halving-doubling"]
    # Each array of its own takes as long as a small pack, so that many cannot be the best choice.
    alone = (BASELINE,) if len(case.elements) <= 8 else ()
    return (*alone, *(f"{name}@{pack}" for name in names for pack in packs))
