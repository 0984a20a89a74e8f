"""`jaxcoll bench`: the all-reduce benchmark that is pointed at a machine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxcoll._files import check_writable, write_result, write_text
from jaxcoll.bench.naming import BASELINE, TWIN, options_of, sizes_of
from jaxcoll.bench.results import Result
from jaxcoll.bench.terminal import complain
from jaxcoll.bench.workloads import TREES, Workload, array_of, tree_of

EPILOG = """\
Without --devices, --processes and --platform it enters a job that was launched by a launcher that
JAX knows (Slurm, Open MPI, ...), and process 0 prints; outside one it simulates 8 devices. The exit
status is 0; 2 with one line on standard error when something cannot be done or a process fails;
130 when it is interrupted. Files are written whole, at the end, or not at all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    what = parser.add_argument_group("what is reduced")
    what.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{', '.join(TREES)}, or a FILE.json of [{{shape, dtype}}, ...]; may be given several "
        "times (default: resnet50, unless --sizes is given)",
    )
    what.add_argument(
        "--sizes",
        metavar="RANGE",
        help="one array of each size: 1MiB, 1KiB:256MiB (powers of 2), 1KiB:1GiB:4 (times 4)",
    )
    what.add_argument("--dtype", default="float32", help="of what does not say (default: float32)")
    what.add_argument("--reduce-op", choices=["mean", "sum"], default="mean")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--algorithms",
        default="auto",
        metavar="LIST",
        help="comma-separated: auto, native, ring, halving-doubling, shuffle, or inner/outer made "
        "of two for several devices on each of several processes; @4MiB or @all behind one says "
        f"how large its packs are (default: auto); {BASELINE} and its A/A twin always take part",
    )
    how.add_argument(
        "--overlap",
        type=int,
        metavar="N",
        help="reduce each tree by N programs, dispatched one by one while the host sleeps in the "
        "place of an accelerator's backward pass, and measure what of it a step waits for",
    )
    how.add_argument("--rounds", type=int, default=20, help="timed rounds (default: 20)")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--devices", type=int, metavar="N", help="of each process (default: all, or 8 simulated)"
    )
    where.add_argument(
        "--processes", type=int, metavar="N", help="start N CPU processes here, over Gloo"
    )
    where.add_argument(
        "--platform", choices=["cpu", "gpu", "tpu", "auto"], help="of this process's devices"
    )
    where.add_argument(
        "--timeout", type=float, default=600, help="seconds for any single step (default: 600)"
    )
    calibration = parser.add_argument_group("what the automatic choice goes by")
    calibration.add_argument(
        "--calibrate",
        action="store_true",
        help="measure, for about ten seconds, what the cost model says of this machine and world, "
        "and keep it where programs here find it; with --json, in that file, to be named by "
        "JAXCOLL_TERMS",
    )
    peers = parser.add_argument_group("against other libraries, in the same run")
    peers.add_argument(
        "--against",
        default="",
        metavar="LIST",
        help="torch (torch.distributed over Gloo, in place), tensorflow "
        "(MultiWorkerMirroredStrategy, RING); needs --processes",
    )
    for name in ("torch", "tensorflow"):
        peers.add_argument(
            f"--{name}-python", metavar="PATH", help=f"an interpreter with {name} (default: this)"
        )
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="FILE", help="one JSON line a result; - for standard output")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture of the results")


def run(args: argparse.Namespace) -> int:
    """Measure, show and write.

    Returns:
      The exit status; see `EPILOG`.
    """
    try:
        with _terminable():
            return _run(args)
    except RuntimeError as error:  # of a rank, with what it printed last
        complain("bench", error)
        return 2
    except KeyboardInterrupt:
        complain("bench", "interrupted; nothing was written.")
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.calibrate:
        from jaxcoll.bench import calibrate

        _check_installed("rich")
        calibrate.check(args)
        calibrate.run(args)
        return 0
    workloads, names = _checked(args)
    if args.overlap is not None:
        from jaxcoll.bench import overlap

        overlap.run(args, workloads, names[-1])
        return 0
    from jaxcoll.bench.all_reduce import measure, steps
    from jaxcoll.bench.table import progress_bar, show
    from jaxcoll.bench.targets import is_first, teams_of

    results: list[Result] = []
    with teams_of(args, [(name,) for name in names]) as teams:
        shown = is_first(teams)
        total = sum(steps(workload, teams, args.rounds) for workload in workloads)
        with progress_bar(total, shown=shown) as progress:
            for workload in workloads:
                results += measure(
                    workload,
                    teams,
                    reduce_op=args.reduce_op,
                    rounds=args.rounds,
                    progress=lambda words, name=workload.name: progress(f"{name}: {words}"),
                )
    if shown:
        _write(args, results)
        show(results, to_stderr=args.json == "-")
    return 0


def _checked(args: argparse.Namespace) -> tuple[list[Workload], list[str]]:
    """The workloads and algorithms; everything that can be refused is refused before the work."""
    _check_installed("rich", *["matplotlib"] * (args.plot is not None))
    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1; got {args.rounds}.")
    asked = _listed(args.algorithms)
    for name in asked:
        if name not in (BASELINE, TWIN):
            options_of(name)
    args.against = _listed(args.against)
    for name in args.against:
        if name not in ("torch", "tensorflow"):
            raise ValueError(f"--against: no library {name!r}; choose torch, tensorflow, or both.")
    trees = args.tree or ([] if args.sizes else ["resnet50"])
    workloads = [tree_of(name, args.dtype) for name in trees]
    if args.sizes:
        workloads += [array_of(size, args.dtype) for size in sizes_of(args.sizes)]
    if args.against and any(len({x.dtype for x in w.leaves}) > 1 for w in workloads):
        raise ValueError("--against: the others take trees of one dtype only.")
    if args.json not in (None, "-"):
        check_writable("--json", Path(args.json))
    if args.plot is not None:
        if args.plot.suffix != ".png":
            raise ValueError(f"--plot: expected a name that ends in .png; got {args.plot}.")
        check_writable("--plot", args.plot)
    return workloads, list(dict.fromkeys([BASELINE, TWIN, *asked]))


def _check_installed(*needs: str) -> None:
    missing = [name for name in needs if not importlib.util.find_spec(name)]
    if missing:
        raise ValueError(
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install 'jaxcoll[bench]'"
        )


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _write(args: argparse.Namespace, results: Sequence[Result]) -> None:
    """All lines or none: a file that is there is never half a result."""
    if args.plot is not None:
        from jaxcoll.bench.chart import draw

        write_result("--plot", args.plot, functools.partial(draw, results))
    lines = "".join(json.dumps(result.to_dict()) + "\n" for result in results)
    if args.json == "-":
        sys.stdout.write(lines)
    elif args.json:
        write_text("--json", Path(args.json), lines)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A request to terminate ends the ranks as well, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
