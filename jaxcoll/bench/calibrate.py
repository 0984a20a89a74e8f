"""`jaxcoll bench --calibrate`: measure the cost terms of a world."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxcoll._plan.cost.fit import EXCHANGED, SIZES, Probe, fitted, probes_of
from jaxcoll._plan.cost.terms import Terms, terms_of
from jaxcoll.bench.all_reduce import WARM, Contestant
from jaxcoll.bench.naming import BASELINE
from jaxcoll.bench.rank_pool import Team
from jaxcoll.bench.timing import interleaved
from jaxcoll.bench.workloads import tree_of

SECONDS = 8.0
"""What measuring may take, without the held-out tree."""
FEWEST, MOST = 3, 40
"""Rounds: fewer give no median, more find nothing new."""
HELD_OUT, HELD_OUT_ROUNDS = "resnet50", 5
STEPS = len(SIZES) + len(EXCHANGED) + 3 + WARM + MOST + 2


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Measured cost terms."""

    terms: Terms  # as measured
    usual: Terms  # those of the preset, which they replace
    measured_on: Mapping[str, Any]  # the circumstances that they hold for
    file: Path  # where they are kept for this user by default
    rounds: int  # over which each term is a median
    held_out: str  # a tree that the terms were not fitted to
    predicted: float  # seconds of its automatic reduction, by the terms
    measured: float  # seconds of the same


def calibrate(
    team: Team, progress: Callable[[str], None], *, writes: Callable[[Path], None]
) -> Calibrated:
    """Measure the terms of a team's world, all of whose hosts must be alike."""
    first, *others = team.do("costs")
    measured_on = first["measured_on"]
    if first["usual"]["key"]["replicas"] < 2:
        raise ValueError("--calibrate: one device exchanges nothing; give it two or more.")
    for rank, other in enumerate(others, 1):
        if (other["usual"], other["measured_on"]) != (first["usual"], measured_on):
            raise ValueError(
                f"--calibrate: processes 0 and {rank} are not on machines alike "
                f"({measured_on}; {other['measured_on']}): no terms hold for both."
            )
    usual, sizes = terms_of(first["usual"]), tuple(first["sizes"])
    file = Path(first["file"])
    writes(file)
    seconds, rounds = _measured(team, usual, sizes, progress)
    source = f"calibration: {usual.key}, {measured_on['machine']}"
    if measured_on["keeps_memory"]:
        source += ", memory that malloc keeps"
    terms = dataclasses.replace(fitted(usual, sizes, seconds), source=source)
    progress(f"{HELD_OUT}, held out")
    # On a tree that the fit has not seen: an error on its own probes would say little.
    predicted, measured = _held_out(team, terms)
    return Calibrated(terms, usual, measured_on, file, rounds, HELD_OUT, predicted, measured)


def _measured(
    team: Team, usual: Terms, sizes: tuple[int, ...], progress: Callable[[str], None]
) -> tuple[dict[Probe, float], int]:
    """Median seconds of every probe, and of how many rounds."""
    probes = probes_of(len(sizes), usual)
    progress("values")
    leaves = [
        {"shape": (probe.nbytes // 4,), "dtype": "float32"}
        for probe in probes
        for _ in range(probe.count)
    ]
    team.do("prepare", leaves=leaves, reduce_op="sum")
    turns: dict[str, Contestant] = {}
    stops = itertools.accumulate(probe.count for probe in probes)
    for k, (probe, stop) in enumerate(zip(probes, stops, strict=True)):
        progress(f"build {k + 1} of {len(probes)}")
        turns[str(k)] = Contestant(str(k), team)
        alone = BASELINE if probe.algorithm == "native" else probe.algorithm
        algorithm = f"{probe.algorithm}@all" if probe.packed else alone
        _build(team, str(k), algorithm, stop - probe.count, stop, usual)
    for _ in range(WARM):
        progress("warm up")
        for c in turns.values():
            c.warm_up()
    # As many rounds as fit into the time, because worlds differ much in speed.
    once = sum(c.warm * c.calls for c in turns.values())
    rounds = min(MOST, max(FEWEST, int(SECONDS / once)))

    found: list[dict[str, float]] = []
    each = {k: lambda c=c: c.turn().seconds for k, c in turns.items()}
    for measured in interleaved(each, rounds):
        progress(f"measure, round {len(found) + 1} of {rounds}")
        found.append(measured)
    return {
        probe: statistics.median(measured[str(k)] for measured in found)
        for k, probe in enumerate(probes)
    }, rounds


def _held_out(team: Team, terms: Terms) -> tuple[float, float]:
    """Seconds of `HELD_OUT`, predicted and measured."""
    tree = [{"shape": x.shape, "dtype": x.dtype.name} for x in tree_of(HELD_OUT, "float32").leaves]
    team.do("prepare", leaves=tree, reduce_op="sum")
    predicted = _build(team, "auto", "auto", 0, len(tree), terms)
    turn = Contestant("auto", team).turn
    turn()
    return predicted, statistics.median(turn().seconds for _ in range(HELD_OUT_ROUNDS))


def _build(team: Team, name: str, algorithm: str, first: int, stop: int, terms: Terms) -> Any:
    part = {"first": first, "stop": stop, "terms": terms.to_dict()}
    return team.do("build", name=name, algorithm=algorithm, **part)[0]
