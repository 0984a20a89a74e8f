"""`jaxcoll inspect`: report the collectives of HLO text, a function, a script or a profile."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TextIO

import jaxcoll as jc
from jaxcoll._report.hang.monitor import report_hangs
from jaxcoll._report.limits import check_limits
from jaxcoll._report.profile.script import OnImport, Script
from jaxcoll._report.profile.shield import Shield
from jaxcoll._show.units import WIDTH, shorten
from jaxcoll.cli import flags

if TYPE_CHECKING:  # JAX, and what needs it, is imported by the script or once there is a target
    from jaxcoll._report.profile.watch import Watch
    from jaxcoll._report.programs import Programs
    from jaxcoll._report.report import Report

PICTURES = "eps gif jpeg jpg pdf pgf png ps raw rgba svg svgz tif tiff webp".split()
"""Suffixes of the formats that matplotlib writes."""

EPILOG = """\
TARGET is a file of HLO text from `compiled.as_text()`, or a function: train.py:name or module:name.
The function needs an attribute `example_args`, a tuple of arrays or jax.ShapeDtypeStructs.
Otherwise it is called without arguments, or with a `mesh` whose axis is "data" if it takes one, and
must return (fun, args), (fun, args, kwargs), or the result of `.lower`. Nothing runs on a device.
With --against, a table compares both targets instead of a report.

--run comes last, followed by a script and its arguments, or by -m and a module. It runs any JAX
program unchanged. When the program ends, the first rank writes a table of all communicating
programs to standard error; output, exit status and signals are the script's own. The exit status is
1 if a --limit is exceeded and the script's status is 0; it is 2, with one line on standard error,
if nothing can be run. With --hang-seconds, hangs are reported, and programs only with one of
--measure, --limit, --json and --plot.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    add = parser.add_argument
    parser.usage = (
        "jaxcoll inspect [flags] (TARGET | --profile FOLDER | --run script.py [arguments ...])"
    )
    add("target", nargs="?", metavar="TARGET", help="FILE.hlo, train.py:name or module:name")
    text = "run a script, or -m and a module, and report every communicating program"
    add("--run", nargs=argparse.REMAINDER, metavar="script.py ...", help=text)
    text = "with --run: profile about N runs, for transfer and waiting times and late ranks"
    add("--measure", type=flags.minimum(1), default=0, metavar="N", help=text)
    text = "read saved profiles, one per host; with --run --measure: save the profiles there"
    add("--profile", type=Path, metavar="FOLDER", help=text)
    text = "with --run: a limit of `jc.assert_collectives` on each program, as in max_count=1"
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--against", metavar="OTHER", help="another TARGET to compare with")
    flags.add_hang(parser)
    flags.add_devices(parser)
    add("--topology", metavar="NAME", help="compile module:name for a cluster, such as h100:8")
    add("--json", metavar="FILE", help="also write JSON to FILE; - prints JSON only")
    add("--plot", type=Path, metavar="FILE", help="draw the schedule, or the measured step")


def run(args: argparse.Namespace) -> int:
    """Report one target, profile or script, and return the exit status."""
    folder: Path | None = args.profile if args.run is None else None
    _check_output(args)
    if args.target and args.run is not None and (not args.run or args.run[0].startswith("--")):
        words = " ".join([*args.run, "--run", args.target])
        raise ValueError(f"--run goes before the script: jaxcoll inspect {words}")
    if (args.target is not None) + (args.run is not None) + (folder is not None) != 1:
        raise ValueError("expected one of TARGET, --profile FOLDER or --run script.py.")
    of_target = [x for x in ("devices", "platform", "topology", "against") if vars(args)[x]]
    if of_target and (args.run is not None or folder is not None):
        raise ValueError(f"--{of_target[0]} needs a TARGET; a script chooses its devices itself.")
    hang = flags.hang_command(args)
    if args.run is not None:
        return _run(args)
    if hang:
        raise ValueError("--hang-seconds needs --run, as in --hang-seconds 60 --run train.py.")
    if args.measure or args.limit:
        raise ValueError("--measure and --limit need --run, as in --measure 20 --run train.py.")
    if folder is not None:
        from jaxcoll._report.profile.watch import read_folder

        programs = read_folder(folder)
        _show(programs, args, sys.stdout)
        for line in programs.unread:
            print(f"jaxcoll inspect: {line}", file=sys.stderr)
        return 2 if programs.unread else 0
    report = _report(args.target, args)
    other = _report(args.against, args) if args.against else None
    if args.plot:
        report.plot(args.plot)
    flags.write_json(args.json, report.to_dict() | ({"against": other.to_dict()} if other else {}))
    if args.json == "-":
        return 0
    if other:
        from jaxcoll._report.report import side_by_side

        targets = args.target, args.against
        names = tuple(map(_short, targets))
        # Two versions of a script may differ in their folder alone.
        names = targets if names[0] == names[1] else names
        print(side_by_side(dict(zip(names, (report, other), strict=True))))
    else:
        print(report.text(_width(sys.stdout)))
    return 0


def _check_output(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything takes time."""
    for file in (args.plot, args.json and args.json != "-" and Path(args.json)):
        if file and not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"cannot write {file}.")
    if args.plot and args.plot.suffix[1:].lower() not in ["", *PICTURES]:
        raise ValueError(f"--plot {args.plot}: a picture is one of {', '.join(PICTURES)}.")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'jaxcoll[cli]'.")


def _run(args: argparse.Namespace) -> int:
    # Check everything that can be checked before the script runs.
    limits = dict(map(_limit, args.limit))
    if limits:
        check_limits(limits)
    if args.profile and not args.measure:
        raise ValueError("--run with --profile needs --measure N: nothing else is recorded.")
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
    passed_on = {word.partition("=")[0] for word in args.run[1:]}
    with_programs = args.measure or limits or args.json or args.plot or not args.hang_seconds
    for flag, value in (("--measure", args.measure), ("--limit", limits)):
        if with_programs and not value and flag in passed_on:
            _say(f"{flag} comes after --run and is passed to the script; put it before --run.")
    shield, process = Shield(), os.getpid()
    watches: list[Watch] = []

    def start() -> None:
        from jaxcoll._report.profile.watch import Watch

        watch = Watch(args.measure, "program", shield, with_programs=bool(args.profile))
        watch.start()
        watches.append(watch)

    script = Script(args.run)  # raises if there is none, before anything is watched
    awaited = OnImport("jax", shield(start)) if with_programs else None
    hangs = report_hangs(args.hang_seconds, end=args.hang_exit) if args.hang_seconds else None
    status = script.run()
    if os.getpid() != process:
        return status  # this is a fork that the script made
    if hangs is not None and not status:
        hangs.explain_silence()
    if awaited is None:
        return status
    awaited.stop()  # what is imported from here on is for the report
    ended = shield(_finish)(args, watches, limits, status, shield)
    if ended is None:  # it failed, and no limit is known to be kept
        _say(shield.notes[-1])
        return status or int(bool(limits))
    return ended


def _finish(
    args: argparse.Namespace, watches: list[Watch], limits: dict[str, Any], status: int,
    shield: Shield,
) -> int:  # fmt: skip
    """Show what was recorded; return the status of the script, or 1 if it exceeds a limit."""
    from jaxcoll._report.profile.measure import this_rank
    from jaxcoll._report.programs import Programs

    sys.stdout.flush()
    programs = Programs(notes=tuple(shield.notes))
    for watch in watches:
        programs = watch.finish(everywhere=False, folder=args.profile)
    try:
        if this_rank() == 0:
            _show(programs, args, sys.stderr)
    except (OSError, ImportError, ValueError) as error:
        _say(str(error))
    try:
        if limits:
            jc.assert_collectives(programs, **limits)
    except AssertionError as error:
        _say(str(error))
        return status or 1
    return status


def _say(text: str) -> None:
    print(f"jaxcoll inspect: {text}", file=sys.stderr, flush=True)


def _limit(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    names = jc.assert_collectives.__kwdefaults__ or {}
    if name not in names:
        raise ValueError(f"--limit: {name} is not a limit; the limits are {', '.join(names)}.")
    example = {"none_in_loops": "", "dtypes": "=bf16,f32", "kinds": "=all-reduce"}.get(name, "=1")
    if example == "=1" and value.isdecimal():
        return name, int(value)
    if example == "=1" or bool(value) != bool(example):
        raise ValueError(f"--limit {text}: expected a limit such as {name}{example}.")
    return name, value.split(",") if example else True


def _show(programs: Programs, args: argparse.Namespace, stream: TextIO) -> None:
    if args.json != "-":
        print(f"\n{programs.text(_width(stream))}", file=stream, flush=True)
    flags.write_json(args.json, programs.to_dict())
    if args.plot and programs.reports:
        programs.plot(args.plot)


def _width(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if stream.isatty() else WIDTH


def _short(target: str) -> str:
    module, colon, name = target.rpartition(":")
    if Path(target).is_file() or not colon:
        return PurePath(target).name
    return f"{PurePath(module.removesuffix('.py')).name.rpartition('.')[2]}:{name}"


def _report(target: str, args: argparse.Namespace) -> Report:
    module, colon, name = target.rpartition(":")
    if Path(target).is_file() and not target.endswith(".py"):
        if args.topology:
            raise ValueError("--topology needs module:name; a file of HLO is already compiled.")
        return jc.inspect(Path(target).read_text(encoding="utf-8", errors="replace"))
    if not colon:
        script = target if target.endswith(".py") else "train.py"
        raise ValueError(
            f"{target} is not a file of HLO text. Name a function after its file or module, as in "
            f"{script}:step; --run {script} runs a whole script."
        )
    # To compile for a cluster, no device of its platform is needed.
    flags.choose_platform(None if args.topology else args.platform, args.devices)
    fun, arguments, named = _program(module, name, args.topology)
    # The user's function and the compiler may raise any error.
    with _explain_errors(f"{target} cannot be compiled"):
        return jc.inspect(fun, *arguments, topology=args.topology, **named)


def _program(
    module: str, name: str, topology: str | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from jaxcoll._step.mesh.clusters import abstract_mesh, topology_named
    from jaxcoll._step.mesh.mesh import check_mesh, takes_mesh

    path = Path(module)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str(path.parent.absolute()) if is_file else "")
    loaded = getattr(sys.modules.get(path.stem), "__file__", None)
    if is_file and loaded and os.path.realpath(loaded) != os.path.realpath(path):
        del sys.modules[path.stem]  # the target of --against may be a file of the same name
    # Importing runs the user's file, which may raise any error.
    with _explain_errors(f"no {name!r} in {module!r}"):
        target = getattr(importlib.import_module(path.stem if is_file else module), name)
    if hasattr(target, "example_args"):
        return target, tuple(target.example_args), dict(getattr(target, "example_kwargs", {}))
    if not callable(target):
        raise ValueError(f"{module}:{name} is not a function; it is {type(target).__name__}.")
    # A missing platform, for example, raises errors of its own.
    with _explain_errors(f"no mesh for {module}:{name}"):
        mesh: dict[str, Any] = {}
        if takes_mesh(target, {}):
            of_cluster = topology and abstract_mesh(topology_named(topology), ("data",))
            mesh["mesh"] = of_cluster or check_mesh(None, "data", "jaxcoll inspect")
    arguments = "with only a `mesh`" if mesh else "without arguments"
    script = module if module.endswith(".py") else f"-m {module}"
    instead = (
        f" Set its arguments, as in `{name}.example_args = (jax.ShapeDtypeStruct((8, 3), "
        f'"float32"),)`, or run the script: jaxcoll inspect --run {script}.'
    )
    what = f"{module}:{name} has no `example_args`, and cannot be called {arguments}"
    with _explain_errors(what, instead):
        made = target(**mesh)
    if not isinstance(made, tuple):
        return made, (), {}
    if len(made) not in (2, 3) or not isinstance(made[1], tuple | list):
        raise ValueError(f"{module}:{name} should return (fun, args) or (fun, args, kwargs).")
    return made[0], tuple(made[1]), dict(made[2]) if len(made) == 3 else {}


@contextlib.contextmanager
def _explain_errors(what: str, instead: str = "") -> Iterator[None]:
    """Turn any error into a ValueError of one line: `what`, its type unless common, its message."""
    try:
        yield
    except Exception as error:
        message = shorten(" ".join(str(error).split()), 400)
        is_plain = isinstance(error, ValueError | OSError) and message
        raise ValueError(
            f"{what}: {message if is_plain else f'{type(error).__name__}: {message}'}"
            + (f".{instead}" if instead else "")
        ) from error
