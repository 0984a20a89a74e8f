"""What an all-reduce would take in worlds of 2 to 16,384 replicas, from the cost model alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxcoll._mesh.world import topology_world
from jaxcoll._plan.algorithms import canonical
from jaxcoll._plan.cost.clusters import CHIPS, Topology, Tpu
from jaxcoll._plan.cost.model import Cost, scaling
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.world import World
from jaxcoll.bench.naming import duration

ALGORITHMS = "native,native/native,ring,halving-doubling,shuffle"
RANKS = tuple(2**k for k in range(1, 15))


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Predictions for one array.

    Attributes:
      what: its name.
      nbytes: its bytes on one replica.
      where: the devices, in words.
      island: replicas of one island (a host of GPUs, a slice of TPUs, a CPU process).
      terms: what they cost.
      lines: for each algorithm the pairs of replicas and cost.
    """

    what: str
    nbytes: int
    where: str
    island: int
    terms: Terms
    lines: dict[str, list[tuple[int, Cost]]]

    def fastest(self, ranks: int) -> str:
        """The algorithm that is predicted to be fastest over so many replicas."""
        at = {name: dict(line)[ranks].seconds for name, line in self.lines.items()}
        return min(at, key=lambda name: at[name])

    def to_dict(self) -> dict[str, object]:
        """Everything in plain numbers and strings, times in seconds."""
        return {
            "what": self.what,
            "bytes": self.nbytes,
            "where": self.where,
            "replicas_of_an_island": self.island,
            "predicted_from": self.terms.source,
            "predictions": [
                {
                    "algorithm": name,
                    "replicas": n,
                    "seconds": cost.seconds,
                    **dataclasses.asdict(cost),
                }
                for name, line in self.lines.items()
                for n, cost in line
            ],
        }

    def __str__(self) -> str:
        table = [["replicas", *self.lines]]
        for n in RANKS:
            best = self.fastest(n)
            cells = [
                duration(dict(line)[n].seconds) + (" *" if name == best else "  ")
                for name, line in self.lines.items()
            ]
            table.append([f"{n:,}", *cells])
        table[0][1:] = [f"{name}  " for name in table[0][1:]]
        widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
        rows = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join(
            [
                f"One all-reduce of {self.nbytes / 1e6:,.1f} MB ({self.what}) on {self.where}",
                *rows,
                f"* fastest. Predicted, not measured, from {self.terms.source}.",
            ]
        )


def simulate(
    what: str, nbytes: int, topology: Topology | None, algorithms: Sequence[str]
) -> Simulation:
    """Predict one array over 2, 4, 8, … 16,384 replicas.

    Args:
      what: the array's name.
      nbytes: its bytes.
      topology: the kind of devices; how many there are in it says only how large a GPU host is.
        None: CPU processes, one a host.
      algorithms: names; the first part of "inner/outer" works within an island.

    Returns:
      The predictions.

    Raises:
      ValueError: there is no such algorithm, or it is of more than two parts; the topology is of
        simulated devices.
    """
    if topology is None:
        world, island = World("cpu", (2,), processes=2, hosts=2), 1
        where = "CPU processes, one a host"
    elif topology.platform == "cpu":
        raise ValueError(
            "--simulate: simulated devices share one machine, however many there are; name a "
            "cluster as in --topology h100:2x8, or --processes for CPU processes, one a host."
        )
    else:
        chip = CHIPS[topology.chip]
        if isinstance(chip, Tpu):
            island = _power_of_two(chip.most_chips * chip.per_chip)
            where = f"{topology.kind}, slices of up to {island:,}"
        else:
            island = _power_of_two(topology.size // topology.hosts)
            where = f"{topology.kind}, {island} a host"
        two = dataclasses.replace(topology_world(topology), sizes=(2 * island,), hosts=2)
        world = dataclasses.replace(two, processes=2)
    terms = preset(world)
    lines = {}
    for name in algorithms:
        known = canonical(name.replace("-", "_"))
        if known.count("/") > 1:
            raise ValueError(
                f"--algorithms: {name!r} has {known.count('/') + 1} parts; there are two levels, "
                "within an island and between islands."
            )
        sizes = [(n // min(n, island), min(n, island)) if "/" in known else n for n in RANKS]
        lines[name] = scaling(known, nbytes, terms, sizes)
    return Simulation(what, nbytes, where, island, terms, lines)


def _power_of_two(most: int) -> int:
    """The largest that is not larger: worlds are of such sizes.

    Examples:
      >>> _power_of_two(8960)
      8192
    """
    return 1 << (most.bit_length() - 1)
