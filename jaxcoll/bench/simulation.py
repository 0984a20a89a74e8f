"""What an all-reduce would take in worlds of 2 to 16,384 replicas, from the cost model alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxcoll._mesh.clusters import CHIPS, Topology, Tpu, topology_world
from jaxcoll._plan.algorithms import canonical, stages
from jaxcoll._plan.plan import Cost
from jaxcoll._plan.world import World
from jaxcoll._prices.predict import Prices
from jaxcoll._prices.rates import Rates, rates_of
from jaxcoll._show.table import Table
from jaxcoll.bench.naming import duration

ALGORITHMS = "native,native/native,ring,halving-doubling,shuffle"
RANKS = tuple(2**k for k in range(1, 15))


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Predictions for one array."""

    what: str  # its name
    nbytes: int  # its bytes on one replica
    where: str  # the devices, in words
    island: int  # replicas of one island (a host of GPUs, a slice of TPUs, a CPU process)
    terms: Rates  # what they cost
    # For each algorithm the costs over so many replicas as `RANKS` has
    lines: dict[str, list[Cost]]

    def to_dict(self) -> dict[str, object]:
        """Everything in plain numbers and strings, times in seconds."""
        return {
            "what": self.what,
            "bytes": self.nbytes,
            "where": self.where,
            "replicas_of_an_island": self.island,
            "predicted_from": self.terms.source,
            "predictions": [
                {"algorithm": name, "replicas": n, "seconds": c.seconds, **dataclasses.asdict(c)}
                for name, line in self.lines.items()
                for n, c in zip(RANKS, line, strict=True)
            ],
        }

    def __str__(self) -> str:
        rows = []
        for n, costs in zip(RANKS, zip(*self.lines.values(), strict=True), strict=True):
            seconds = [cost.seconds for cost in costs]
            best = seconds.index(min(seconds))
            marks = (" *" if k == best else "  " for k in range(len(seconds)))
            rows.append([f"{n:,}", *(duration(s) + m for s, m in zip(seconds, marks, strict=True))])
        columns = ("replicas", *(f"{name}  " for name in self.lines))
        head = f"One all-reduce of {self.nbytes / 1e6:,.1f} MB ({self.what}) on {self.where}"
        table = Table(columns, ">" * len(columns), rows).text()
        return f"{head}\n{table}\n* fastest. Predicted, not measured, from {self.terms.source}."


def simulate(
    what: str, nbytes: int, topology: Topology | None, algorithms: Sequence[str]
) -> Simulation:
    """Predict one array over 2, 4, 8, … 16,384 replicas.

    How many devices `topology` has says only how large a GPU host is; None: CPU processes, one per
    host. The first part of an algorithm "inner/outer" works within an island.

    Raises:
      ValueError: there is no such algorithm, or the topology is of simulated devices.
    """
    where, island, world = _island(topology)
    terms = rates_of(world)
    lines = {}
    for name in algorithms:
        known = canonical(name.replace("-", "_"))
        if known.count("/") > 1:
            raise ValueError(
                f"--algorithms: {name!r} has {known.count('/') + 1} parts; there are two levels, "
                "within an island and between islands."
            )
        axes = [(n // min(n, island), min(n, island)) if "/" in known else (n,) for n in RANKS]
        lines[name] = [Prices(terms, sizes).of(stages(known, 0, sizes), nbytes) for sizes in axes]
    return Simulation(what, nbytes, where, island, terms, lines)


def _island(topology: Topology | None) -> tuple[str, int, World]:
    """The devices in words, replicas of an island, and a world of two islands."""
    if topology is None:
        return "CPU processes, one a host", 1, World("cpu", (2,), processes=2, hosts=2)
    if topology.platform == "cpu":
        raise ValueError(
            "--simulate: simulated devices share one machine, however many there are; name a "
            "cluster as in --topology h100:2x8, or --processes for CPU processes, one a host."
        )
    chip = CHIPS[topology.chip]
    # Worlds are powers of two, and so are islands.
    if isinstance(chip, Tpu):
        island = _power_of_two(chip.most_chips * chip.per_chip)
        where = f"{topology.kind}, slices of up to {island:,}"
    else:
        island = _power_of_two(topology.size // topology.hosts)
        where = f"{topology.kind}, {island} a host"
    # Two islands: a preset has the links within one and between them.
    world = topology_world(topology)
    return where, island, dataclasses.replace(world, sizes=(2 * island,), hosts=2, processes=2)


def _power_of_two(most: int) -> int:
    """The largest that is not larger."""
    return 1 << (most.bit_length() - 1)
