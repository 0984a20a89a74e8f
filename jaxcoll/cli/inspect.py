"""`jaxcoll inspect`: what a compiled text, or a function that is compiled now, will send."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TextIO

from jax.sharding import AbstractMesh, Mesh

import jaxcoll as jc
from jaxcoll._mesh.clusters import abstract_mesh, topology_named
from jaxcoll._mesh.mesh import checked_mesh, takes_mesh
from jaxcoll._show.units import WIDTH, shortened
from jaxcoll._watch.script import Script
from jaxcoll._watch.watch import Watch, read_folder, this_rank
from jaxcoll.cli import flags

if TYPE_CHECKING:  # the readers of programs are imported once there is something to read
    from jaxcoll._observe.programs import Programs
    from jaxcoll._observe.report import Report

EPILOG = """\
TARGET is a file of HLO text, as `compiled.as_text()` returns it; or train.py:name, or module:name,
of a function that has its arguments in an attribute `example_args`, a tuple of arrays or
jax.ShapeDtypeStructs; or one that returns (fun, args), (fun, args, kwargs), or what `.lower`
returned, and takes nothing, or a `mesh`: then it gets one with the axis "data". Nothing of it is
run on a device. With --against there is a table of both instead of the report of one.

--run comes last, with a script and its arguments, or -m and a module: any JAX program, as it is.
When it ends, a table of the programs that communicate is written to standard error, by the first
rank for all; output, exit status and signals are the script's own. The exit status is 1 where a
--limit is exceeded and the script's is 0; 2, with one line, where nothing can be run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    add = parser.add_argument
    parser.usage = (
        "jaxcoll inspect [flags] (TARGET | --profile FOLDER | --run script.py [arguments ...])"
    )
    add("target", nargs="?", metavar="TARGET", help="FILE.hlo, train.py:name or module:name")
    words = "run a script, or -m and a module, and report every program that communicates"
    add("--run", nargs=argparse.REMAINDER, metavar="script.py ...", help=words)
    words = "with --run: profile about N runs: transfer, waiting, and the rank that comes late"
    add("--measure", type=flags.at_least(1), default=0, metavar="N", help=words)
    words = "read saved profiles, one of each host; with --run --measure: keep them there"
    add("--profile", type=Path, metavar="FOLDER", help=words)
    words = "with --run: a limit of `jc.assert_collectives` on each program, as in max_count=1"
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help=words)
    add("--against", metavar="OTHER", help="another TARGET, of which the figures stand beside")
    flags.add_devices(parser)
    add("--topology", metavar="NAME", help="a cluster that is not here, to compile module:name for")
    add("--json", metavar="FILE", help="write the report to FILE; - for here")
    add("--plot", type=Path, metavar="FILE", help="draw the schedule, as in a.png")


def run(args: argparse.Namespace) -> int:
    """Read, compile or run, and show; the exit status."""
    folder: Path | None = args.profile if args.run is None else None
    if (args.target is not None) + (args.run is not None) + (folder is not None) != 1:
        raise ValueError("expected one of TARGET, --profile FOLDER and --run script.py.")
    if args.run is not None:
        return _run(args)
    if args.measure or args.limit:
        raise ValueError("--measure and --limit are for --run, as in --measure 20 --run train.py.")
    if folder is not None:
        _show(read_folder(folder), args, sys.stdout)
        return 0
    report = _report(args.target, args)
    other = _report(args.against, args) if args.against else None
    if args.plot:
        report.plot(args.plot)
    flags.write_json(args.json, report.to_dict() | ({"against": other.to_dict()} if other else {}))
    if args.json == "-":
        return 0
    if other:
        from jaxcoll._observe.report import side_by_side

        print(side_by_side({_short(args.target): report, _short(args.against): other}))
    else:
        print(report.text(_width(sys.stdout)))
    return 0


def _run(args: argparse.Namespace) -> int:
    """Run a script, and show what it sent and what that took."""
    # All that can be found wrong before the script runs.
    limits = dict(map(_limit, args.limit))
    if limits:
        from jaxcoll._observe.programs import Programs

        jc.assert_collectives(Programs(quiet=1), **limits)
    if args.profile and not args.measure:
        raise ValueError("--run with --profile needs --measure N: nothing else is recorded.")
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
    for file in (args.plot, args.json and args.json != "-" and Path(args.json)):
        if file and not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"{file} cannot be written.")
    script = Script(args.run)
    watch, process = Watch(args.measure, with_programs=bool(args.profile)), os.getpid()
    watch.start()
    status = script.run()
    if os.getpid() != process:
        return status  # a fork of the script's own
    watch.stop()
    programs = watch.programs(everywhere=False, folder=args.profile)
    sys.stdout.flush()
    try:
        if this_rank() == 0:
            _show(programs, args, sys.stderr)
        if limits:
            jc.assert_collectives(programs, **limits)
    except (AssertionError, OSError, ImportError, ValueError) as error:
        print(f"jaxcoll inspect: {error}", file=sys.stderr)
        status = status or 1
    words = {word.partition("=")[0] for word in args.run[1:]}
    for flag, given in (("--measure", args.measure), ("--limit", limits)):
        if this_rank() == 0 and not given and flag in words:
            print(
                f"jaxcoll inspect: {flag} stands behind --run and went to the script; before --run "
                "it is for jaxcoll.",
                file=sys.stderr,
            )
    return status


def _limit(text: str) -> tuple[str, Any]:
    """Return the name and the value of a --limit, as `jc.assert_collectives` takes them."""
    name, _, value = text.partition("=")
    names = jc.assert_collectives.__kwdefaults__ or {}
    if name not in names:
        raise ValueError(f"--limit: {name} is no limit; there are {', '.join(names)}.")
    likely = {"none_in_loops": "", "dtypes": "=bf16,f32", "kinds": "=all-reduce"}.get(name, "=1")
    if likely == "=1" and value.isdecimal():
        return name, int(value)
    if likely == "=1" or bool(value) != bool(likely):
        raise ValueError(f"--limit {text}: expected a limit such as {name}{likely}.")
    return name, value.split(",") if likely else True


def _show(programs: Programs, args: argparse.Namespace, stream: TextIO) -> None:
    if args.json != "-":
        print(f"\n{programs.text(_width(stream))}", file=stream, flush=True)
    flags.write_json(args.json, programs.to_dict())
    if args.plot and programs.reports:
        programs.plot(args.plot)


def _width(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if stream.isatty() else WIDTH


def _short(target: str) -> str:
    """A target without the folders or packages that it is in."""
    module, colon, name = target.rpartition(":")
    is_file = Path(target).is_file() or not colon
    return PurePath(target).name if is_file else f"{module.rpartition('.')[2]}:{name}"


def _report(target: str, args: argparse.Namespace) -> Report:
    module, colon, name = target.rpartition(":")
    if Path(target).is_file() and not target.endswith(".py"):
        if args.topology:
            raise ValueError("--topology is for module:name; a file is compiled already.")
        return jc.inspect(Path(target).read_text(encoding="utf-8", errors="replace"))
    if not colon:
        script = target if target.endswith(".py") else "train.py"
        raise ValueError(
            f"{target} is no file of HLO text. A function is named behind its file or module, as "
            f"in {script}:step; --run {script} runs a whole script."
        )
    flags.choose_platform(args.platform, args.devices)
    fun, arguments, named = _program(module, name, args.topology)
    # A user's function may raise anything while it is traced, and so may a compiler.
    with _explained(f"{target} cannot be compiled"):
        return jc.inspect(fun, *arguments, topology=args.topology, **named)


def _program(
    module: str, name: str, topology: str | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The program that module:name stands for, and its arguments."""
    path = Path(module)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str(path.parent.absolute()) if is_file else "")
    # Importing runs the user's file, which may raise anything.
    with _explained(f"no {name!r} in {module!r}"):
        target = getattr(importlib.import_module(path.stem if is_file else module), name)
    if hasattr(target, "example_args"):
        return target, tuple(target.example_args), dict(getattr(target, "example_kwargs", {}))
    if not callable(target):
        raise ValueError(f"{module}:{name} is not a function; it is {type(target).__name__}.")
    # A platform that is not here, for one, has errors of its own.
    with _explained(f"no mesh for {module}:{name}"):
        mesh = {"mesh": _mesh(topology)} if takes_mesh(target, {}) else {}
    alone = "with a `mesh` alone" if mesh else "without arguments"
    script = module if module.endswith(".py") else f"-m {module}"
    instead = (
        f" Say what it takes, as in `{name}.example_args = (jax.ShapeDtypeStruct((8, 3), "
        f'"float32"),)`, or run the script: jaxcoll inspect --run {script}.'
    )
    what = f"{module}:{name} has no `example_args`, and cannot be called {alone}"
    with _explained(what, instead):
        made = target(**mesh)
    if not isinstance(made, tuple):
        return made, (), {}
    if len(made) not in (2, 3) or not isinstance(made[1], tuple | list):
        raise ValueError(f"{module}:{name} should return (fun, args) or (fun, args, kwargs).")
    return made[0], tuple(made[1]), dict(made[2]) if len(made) == 3 else {}


def _mesh(topology: str | None) -> Mesh | AbstractMesh:
    if topology is None:
        return checked_mesh(None, "data", "jaxcoll inspect")
    return abstract_mesh(topology_named(topology), ("data",))


@contextlib.contextmanager
def _explained(what: str, instead: str = "") -> Iterator[None]:
    """Any error as one line behind `what`, with its type where its words alone do not say it."""
    try:
        yield
    except Exception as error:
        words = shortened(" ".join(str(error).split()), 400)
        is_plain = isinstance(error, ValueError | OSError) and words
        raise ValueError(
            f"{what}: {words if is_plain else f'{type(error).__name__}: {words}'}"
            + (f".{instead}" if instead else "")
        ) from error
