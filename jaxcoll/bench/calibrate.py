"""`jaxcoll bench --calibrate`: measures what a world costs, and keeps it for the plans to come."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxcoll._files import check_writable, write_text
from jaxcoll._mesh.machine_costs import FILE, calibration
from jaxcoll._plan.cost.fit import PROBES, Probe, fitted
from jaxcoll._plan.cost.terms import Terms, terms_of
from jaxcoll.bench.all_reduce import MOST_CALLS, SHORTEST, WARM, Contestant
from jaxcoll.bench.naming import BASELINE
from jaxcoll.bench.rank_pool import Team
from jaxcoll.bench.timing import interleaved
from jaxcoll.bench.workloads import tree_of

SECONDS = 8.0
"""What measuring may take, the held-out tree not counted."""
FEWEST, MOST = 3, 40
"""Rounds: fewer are no median, more find nothing new."""
HELD_OUT, HELD_OUT_ROUNDS = "resnet50", 5
STEPS = len(PROBES.sizes) + len(PROBES.exchanged) + 3 + WARM + MOST + 2
_LEFT_OUT = {
    "tree": [],
    "sizes": None,
    "algorithms": "auto",
    "dtype": "float32",
    "reduce_op": "mean",
    "rounds": 20,
    "against": "",
    "plot": None,
    "overlap": None,
}
"""Flags that say what else to measure, as they are when nobody gives them."""


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """What came out.

    Attributes:
      terms: as measured.
      usual: those of the preset, which they replace.
      measured_on: the circumstances that they hold for.
      file: where they are kept for this user, if nothing else is said.
      rounds: of which each term's median is.
      held_out: a tree that the terms were not fitted to.
      predicted: seconds of its automatic reduction, by the terms.
      measured: seconds of the same.
    """

    terms: Terms
    usual: Terms
    measured_on: Mapping[str, Any]
    file: Path
    rounds: int
    held_out: str
    predicted: float
    measured: float


def check(args: argparse.Namespace) -> None:
    """Refuse flags that say what else to measure.

    Raises:
      ValueError: there is one, or the file cannot be written.
    """
    for name, default in _LEFT_OUT.items():
        if getattr(args, name) != default:
            raise ValueError(
                f"--calibrate measures what the cost model needs: leave --{name.replace('_', '-')} "
                "out."
            )
    if args.json not in (None, "-"):
        check_writable("--json", Path(args.json))


def calibrate(
    team: Team, progress: Callable[[str], None], *, writes: Callable[[Path], None]
) -> Calibrated:
    """Measure the terms of a team's world.

    Args:
      team: of JAX.
      progress: told what is being done, at most `STEPS` times.
      writes: called with the file, before anything is measured; raises where it cannot be written.

    Raises:
      ValueError: a single replica, or hosts that are not alike.
      LaunchError: a rank failed.
    """
    told = team.do("costs")
    if told[0]["usual"]["key"]["replicas"] < 2:
        raise ValueError("--calibrate: one device exchanges nothing; give it two or more.")
    for rank, other in enumerate(told):
        if (other["usual"], other["measured_on"]) != (told[0]["usual"], told[0]["measured_on"]):
            raise ValueError(
                f"--calibrate: processes 0 and {rank} are not on machines alike "
                f"({told[0]['measured_on']}; {other['measured_on']}): no terms hold for both."
            )
    usual, sizes = terms_of(told[0]["usual"]), tuple(told[0]["sizes"])
    file = Path(told[0]["file"])
    writes(file)
    seconds, rounds = _measured(team, usual, sizes, progress)
    source = f"calibration: {usual.key}, {told[0]['measured_on']['machine']}"
    if told[0]["measured_on"]["keeps_memory"]:
        source += ", memory that malloc keeps"
    terms = dataclasses.replace(fitted(usual, sizes, seconds), source=source)
    progress(f"{HELD_OUT}, held out")
    predicted, measured = _held_out(team, terms)
    return Calibrated(
        terms, usual, told[0]["measured_on"], file, rounds, HELD_OUT, predicted, measured
    )


def _measured(
    team: Team, usual: Terms, sizes: tuple[int, ...], progress: Callable[[str], None]
) -> tuple[dict[Probe, float], int]:
    """Median seconds of every probe, and of how many rounds."""
    probes = PROBES.of(len(sizes), usual)
    progress("values")
    leaves = [size for probe in probes for size in [probe.nbytes] * probe.count]
    team.do("prepare", leaves=[_float32(n) for n in leaves], reduce_op="sum")
    turns: dict[str, Contestant] = {}
    first = 0
    for k, probe in enumerate(probes):
        progress(f"build {k + 1} of {len(probes)}")
        turns[str(k)] = Contestant(str(k), team)
        stop = first + probe.count
        _build(team, str(k), _spelled(probe), first, stop, usual)
        first = stop
    for _ in range(WARM):
        progress("warm up")
        for c in turns.values():
            c.warm = c.turn().seconds
    for c in turns.values():
        c.calls = min(MOST_CALLS, math.ceil(SHORTEST / c.warm))
    once = sum(c.warm * c.calls for c in turns.values())
    rounds = min(MOST, max(FEWEST, int(SECONDS / once)))

    def turn(name: str) -> float:
        return turns[name].turn().seconds

    found: list[dict[str, float]] = []
    for measured in interleaved({k: lambda k=k: turn(k) for k in turns}, rounds):
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
    """See `JaxRank.build`; no file that is there, whole or not, has a say in a calibration."""
    told = terms.to_dict()
    return team.do("build", name=name, algorithm=algorithm, first=first, stop=stop, terms=told)[0]


def _spelled(probe: Probe) -> str:
    """A probe's algorithm as on the command line."""
    if probe.packed:
        return f"{probe.algorithm}@all"
    return BASELINE if probe.algorithm == "native" else probe.algorithm


def _float32(nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes // 4,), "dtype": "float32"}


def run(args: argparse.Namespace) -> None:
    """Calibrate the world that the flags describe; show and keep the terms.

    Raises:
      ValueError: the flags ask for what is not there, or the file cannot be written.
    """
    from jaxcoll.bench.calibration_table import show
    from jaxcoll.bench.table import progress_bar
    from jaxcoll.bench.targets import is_first, teams_of

    asked = None if args.json is None else Path(args.json)

    def writes(file: Path) -> None:
        if asked is None:
            check_writable("--calibrate", file)

    with teams_of(args, [(BASELINE,)]) as teams:
        shown = is_first(teams)
        with progress_bar(STEPS, shown=shown) as progress:
            found = calibrate(teams[0], progress, writes=writes)
    if not shown:
        return
    text = calibration(found.terms, dict(found.measured_on))
    if args.json == "-":
        sys.stdout.write(text)
    else:
        write_text("--json" if asked else "--calibrate", asked or found.file, text)
    show(found, _kept(args, found), to_stderr=args.json == "-")


def _kept(args: argparse.Namespace, found: Calibrated) -> str:
    """Where the terms are, and who will go by them."""
    if args.json == "-":
        return f"Keep these lines in a file and name it in {FILE}."
    if args.json is not None:
        return f"In {args.json}; name it in {FILE} wherever it is to be gone by."
    key = found.terms.key
    if key.processes == 1:
        return f"In {found.file}, where programs of one process on this machine find it."
    return (
        f"In {found.file}. Processes that jaxcoll starts on this host find it there; others need "
        f"{FILE}={found.file}, the same file for all of them."
    )
