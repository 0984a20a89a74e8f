"""`jaxcoll bench`: measure all-reduces on a machine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll._files import write_result
from jaxcoll.bench import targets
from jaxcoll.bench.lab import Network
from jaxcoll.bench.naming import BASELINE, PEERS, TWIN, options_of, sizes_of
from jaxcoll.bench.rank_pool import Entry, Team
from jaxcoll.bench.targets import from_checkout
from jaxcoll.bench.terminal import new_console, progress_bars
from jaxcoll.bench.workloads import Workload, array_of, tree_of
from jaxcoll.cli import flags
from jaxcoll.cli.streams import complain

EPILOG = """\
Without --devices, --processes and --platform it enters a job that was launched by a launcher that
JAX knows (Slurm, Open MPI, ...), and process 0 prints; outside one it simulates 8 devices. The exit
status is 0; 2 with one line on standard error when something cannot be done or a process fails;
130 when it is interrupted. Files are written completely, at the end, or not at all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    add = flags.add_tree(parser, several=True).add_argument
    words = "one array of each size: 1MiB, 1KiB:256MiB (powers of 2), 1KiB:1GiB:4 (times 4)"
    add("--sizes", metavar="RANGE", help=words)
    add = parser.add_argument_group("how").add_argument
    add(
        "--algorithms",
        default="auto",
        metavar="LIST",
        help="comma-separated: auto, native, ring, halving-doubling, shuffle, or inner/outer made "
        "of two for several devices on each of several processes; +bf16, +int8 or +int4 behind one "
        "says what travels, @4MiB or @all how large its packs are (default: auto); "
        f"{BASELINE} and its A/A twin always take part",
    )
    add(
        "--overlap",
        type=int,
        metavar="N",
        help="reduce each tree by N programs, dispatched one by one while the host sleeps in the "
        "place of an accelerator's backward pass, and measure what of it a step waits for; needs a "
        "checkout",
    )
    add("--rounds", type=int, default=20, help="timed rounds (default: 20)")
    where = parser.add_argument_group("where")
    flags.add_devices(where, "of each process (default: all, or {simulated} simulated)")
    add = where.add_argument
    add("--processes", type=int, metavar="N", help="start N CPU processes here, over Gloo")
    flags.add_platform(where, default=None, help="of this process's devices")
    add(
        "--rate",
        metavar="RATE",
        help="start CPU processes on hosts of their own, network namespaces on this machine, whose "
        "links carry so much each way: 200mbit, 1gbit, none (for no limit)",
    )
    add("--hosts", type=int, metavar="H", help="with --rate (default: 2)")
    add("--per-host", type=int, metavar="P", help="processes on each, with --rate (default: 1)")
    add("--timeout", type=float, default=600, help="seconds for any single step (default: 600)")
    add = parser.add_argument_group("what the automatic choice costs").add_argument
    add(
        "--regret",
        action="store_true",
        help="measure it beside hand-made choices, on random trees over 2, 4 and 8 processes of "
        "one host and of two, whose network has a rate or none (see --rate); with --json FILE, a "
        "line for each case as soon as it is known, and cases whose lines are there are left out; "
        "needs a checkout",
    )
    add("--cases", type=int, default=40, help="with --regret (default: 40)")
    add("--seed", type=int, default=0, help="of these cases (default: 0)")
    add = parser.add_argument_group("against other libraries, in the same run").add_argument
    add(
        "--against",
        default="",
        metavar="LIST",
        help="torch (torch.distributed over Gloo, in place), tensorflow "
        "(MultiWorkerMirroredStrategy, RING); needs --processes, and a checkout",
    )
    for name in PEERS:
        add(f"--{name}-python", metavar="PATH", help=f"an interpreter with {name} (default: this)")
    add = parser.add_argument_group("results").add_argument
    add("--json", metavar="FILE", help="one JSON line per result; - for standard output")
    add("--plot", type=Path, metavar="FILE.png", help="draw a picture of the results")


_OF_OTHERS: dict[str, Any] = {
    "tree": [],
    "sizes": None,
    "algorithms": "auto",
    "dtype": "float32",
    "reduce_op": "mean",
    "against": "",
    "plot": None,
    "overlap": None,
}
"""Flags that say what else to measure, with their defaults."""


def run(args: argparse.Namespace) -> int:
    """Measure, show and write; the exit status, as `EPILOG` has it."""
    try:
        with _terminable():
            flags.check_least(args, 1, "rounds", "devices", "per_host")
            flags.check_installed("bench", "rich", *["matplotlib"] * (args.plot is not None))
            if args.regret:
                from_checkout("--regret: it is", "regret").run(args)
                return 0
            workloads, names = _checked(args)
            if args.overlap is not None:
                part = from_checkout("--overlap: it is", "overlap")
                part.run(args, workloads, names[-1])
            else:
                _compare(args, workloads, names)
            return 0
    except RuntimeError as error:  # of a rank, with what it printed last
        complain("bench", error)
        return 2
    except KeyboardInterrupt:
        written = "cases that were measured are in --json" if args.regret else "nothing was written"
        complain("bench", f"interrupted; {written}.")
        return 130


def _compare(args: argparse.Namespace, workloads: list[Workload], names: list[str]) -> None:
    """Each of `names` on every workload."""
    from jaxcoll.bench.all_reduce import measure, steps
    from jaxcoll.bench.table import show

    results = []
    with teams_of(args, [(name,) for name in names]) as (teams, is_first):
        total = sum(steps(workload, teams, args.rounds) for workload in workloads)
        with progress_of(total, shown=is_first) as progress:
            for workload in workloads:
                results += measure(
                    workload,
                    teams,
                    reduce_op=args.reduce_op,
                    rounds=args.rounds,
                    progress=lambda words, name=workload.name: progress(f"{name}: {words}"),
                )
    if is_first:
        if args.plot is not None:
            from jaxcoll.bench.chart import draw

            write_result("--plot", args.plot, functools.partial(draw, results))
        flags.write_lines(args.json, "".join(json.dumps(each.to_dict()) + "\n" for each in results))
        show(results, to_stderr=args.json == "-")


def check_unset(args: argparse.Namespace, because: str, more: Mapping[str, Any]) -> None:
    """Refuse flags that would be ignored."""
    for name, default in {**_OF_OTHERS, **more}.items():
        if getattr(args, name) != default:
            raise ValueError(f"{because}: leave --{name.replace('_', '-')} out.")


@contextlib.contextmanager
def teams_of(
    args: argparse.Namespace, entries: Sequence[Entry]
) -> Iterator[tuple[list[Team], bool]]:
    """The teams that the flags ask for, and whether this process prints and writes."""
    with targets.teams_of(
        entries,
        processes=args.processes,
        devices=args.devices,
        platform=args.platform,
        network=_network(args),
        against={name: getattr(args, f"{name}_python") for name in args.against or ()},
        timeout=args.timeout,
    ) as teams:
        yield teams, targets.is_first(teams)


def _network(args: argparse.Namespace) -> Network | None:
    """The hosts that the flags ask for, if any."""
    if args.rate is None:
        if args.hosts is not None or args.per_host is not None:
            raise ValueError("--hosts and --per-host need --rate; --rate none limits nothing.")
        return None
    return Network(2 if args.hosts is None else args.hosts, args.per_host or 1, args.rate)


@contextlib.contextmanager
def progress_of(steps: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, where that is a terminal; call it at each step, with words."""
    console = new_console(stderr=True, quiet=not shown)
    with progress_bars(console, [""], steps, transient=True) as advance:
        yield lambda words: advance("", words)


def _checked(args: argparse.Namespace) -> tuple[list[Workload], list[str]]:
    """The workloads and algorithms; everything that can be refused is refused before the work."""
    asked = _listed(args.algorithms)
    for name in asked:
        if name not in (BASELINE, TWIN):
            options_of(name)
    args.against = _listed(args.against)
    for name in args.against:
        if name not in PEERS:
            raise ValueError(f"--against: no library {name!r}; choose torch, tensorflow, or both.")
    trees = args.tree or ([] if args.sizes else ["resnet50"])
    workloads = [tree_of(name, args.dtype) for name in trees]
    if args.sizes:
        workloads += [array_of(size, args.dtype) for size in sizes_of(args.sizes)]
    if args.against and any(len({x.dtype for x in w.leaves}) > 1 for w in workloads):
        raise ValueError("--against: the others take trees of one dtype only.")
    flags.check_results(args.json, args.plot)
    return workloads, list(dict.fromkeys([BASELINE, TWIN, *asked]))


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A request to terminate ends the ranks as well, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
