"""The rule beside the best choice, in predicted seconds: `python -m benchmarks.predicted_regret`.

Random trees over 2, 4 and 8 CPU processes, on one host or on two that a network of 100 Mbit/s,
1 Gbit/s or 10 Gbit/s joins. The rule does not know which; the prediction does. The best choice has
the packing, and for each pack the algorithm, that are predicted to be fastest, out of those that
`CANDIDATES` and the world allow. Every constant in `jaxcoll/_plan/planner.py` was tried here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from typing import NamedTuple

import numpy as np

from jaxcoll._plan.algorithms import exchange, exchange_within, stages
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import UNPACKED, BytesPerPack, Pack, plan_packs
from jaxcoll._plan.planner import make_plan
from jaxcoll._plan.world import World
from jaxcoll._prices.predict import Prices, loads_of
from jaxcoll._prices.rates import rates_of

KiB, MiB = 1 << 10, 1 << 20
CANDIDATES = (
    UNPACKED,
    *(BytesPerPack(8 * alone, alone) for alone in (256 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB)),
    BytesPerPack(MiB),
    BytesPerPack(1 << 60),
)
NETWORKS = ("ethernet-0.1", "ethernet-1", "ethernet-10")
PROCESSES = (2, 4, 8)
FEWEST_BYTES, MOST_BYTES, MOST_LEAVES = 4 * KiB, 8 * MiB, 100
F32 = np.dtype(np.float32)


class Case(NamedTuple):
    """A tree in a world."""

    hosts: int
    processes: int
    network: str  # between the hosts
    elements: tuple[int, ...]  # of each leaf, of float32

    @property
    def world(self) -> World:
        """One axis, or two where the hosts have several processes each."""
        n, per_host = self.processes, self.processes // self.hosts
        if self.hosts == 1 or per_host == 1:
            return World("cpu", (n,), processes=n, hosts=self.hosts)
        return World("cpu", (self.hosts, per_host), processes=n, hosts=self.hosts, inner=1)

    def __str__(self) -> str:
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts, {self.network}"
        size = f"{4 * sum(self.elements) / 1e6:.3g} MB in {len(self.elements)} leaves"
        return f"{self.processes} processes, {where}: {size}"


def cases(count: int, seed: int) -> list[Case]:
    """Return the first `count` cases of a seed; the same ones whatever `count` is."""
    return [_case(np.random.default_rng([seed, number])) for number in range(count)]


def _case(random: np.random.Generator) -> Case:
    hosts, processes = int(random.choice((1, 2))), int(random.choice(PROCESSES))
    network = str(random.choice(NETWORKS)) if hosts > 1 else ""
    leaves = int(_between(random, 1, MOST_LEAVES))
    nbytes = _between(random, FEWEST_BYTES, MOST_BYTES)
    # Leaves of a model differ in size by orders of magnitude.
    shares = random.lognormal(sigma=2.0, size=leaves)
    elements = np.maximum(1, nbytes / 4 * shares / shares.sum()).astype(int)
    return Case(hosts, processes, network, tuple(elements.tolist()))


def _between(random: np.random.Generator, low: float, high: float) -> float:
    """Return a number whose logarithm is as likely anywhere between the two."""
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def algorithms(world: World) -> tuple[str, ...]:
    """Return the algorithms that may sum a pack, the compiler's own first."""
    if len(world.sizes) == 1:
        return ("native", exchange(world.replicas))
    outer, inner = world.sizes
    within = exchange_within(inner, world)
    return ("native", f"{within}/native", f"{within}/{exchange(outer)}")


def regret(case: Case) -> float:
    """Return the seconds of the rule's choice over those of the best one."""
    world = case.world
    leaves = [Leaf(str(k), (size,), F32, F32, world.sizes) for k, size in enumerate(case.elements)]
    prices = Prices(rates_of(world, case.network), world.sizes)

    def seconds(packs: tuple[Pack, ...]) -> float:
        its = [stages(pack.algorithm, 0, pack.over) for pack in packs]
        return prices.of_loads(loads_of(packs, leaves, its)).seconds

    def alone(pack: Pack) -> float:
        handing_over = prices.rates.array * (pack.algorithm == "native")
        return prices.of(stages(pack.algorithm, 0, pack.over), pack.nbytes).seconds + handing_over

    def fastest(pack: Pack) -> Pack:
        names = algorithms(world)
        return min((dataclasses.replace(pack, algorithm=name) for name in names), key=alone)

    best = min(
        seconds(tuple(fastest(pack) for pack in plan_packs(leaves, rule))) for rule in CANDIDATES
    )
    plan = make_plan(ReduceOp.SUM, leaves, CommunicationOptions(), world)
    return seconds(plan.packs) / best


def main() -> None:
    """Print the mean and the worst of each kind of world, and the worst cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ratios = {case: regret(case) for case in cases(args.cases, args.seed)}
    for hosts in (1, 2):
        for processes in PROCESSES:
            kind = [r for c, r in ratios.items() if (c.hosts, c.processes) == (hosts, processes)]
            if kind:
                mean, worst = statistics.geometric_mean(kind), max(kind)
                print(f"{hosts} host(s), {processes} processes: {mean:.3f}, worst {worst:.2f}")
    for case in sorted(ratios, key=ratios.__getitem__)[-5:]:
        print(f"{ratios[case]:.2f}  {case}")
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    print(f"{len(ratios)} cases: {mean:.3f} (geometric mean), {max(ratios.values()):.2f} (worst)")


if __name__ == "__main__":
    main()
