"""`jaxcoll inspect`: what a compiled text, or a function that is compiled now, will send."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxcoll._files import check_writable, write_result
from jaxcoll._mesh.clusters import topology_named
from jaxcoll._mesh.mesh import abstract_mesh, checked_mesh, takes_mesh
from jaxcoll._observe.report import Report, report_of, side_by_side
from jaxcoll._show.units import WIDTH, shortened
from jaxcoll.bench.targets import SIMULATED
from jaxcoll.cli.flags import add_devices, add_platform, check_least, check_results, write_lines
from jaxcoll.cli.streams import patience, terminal_width

EPILOG = """\
TARGET is a file of HLO text, as `compiled.as_text()` returns it; or module:name. The name is a
function that has its arguments in an attribute `example_args`, a tuple of arrays or
jax.ShapeDtypeStructs; or one that returns (fun, args), (fun, args, kwargs), or what `.lower`
returned, and takes nothing, or a `mesh`: then it gets one with the axis "data". Nothing of it is
run on a device. With --against there is a table of both instead of the report of one. The exit
status is 0, or 2 with one line on standard error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("target", metavar="TARGET", help="FILE.hlo, or module:name")
    add("--against", metavar="OTHER", help="another TARGET, of which the figures stand beside")
    words = "simulated CPU devices to compile for (default: {simulated}, unless the module says)"
    add_devices(parser, words)
    add_platform(parser)
    add("--topology", metavar="NAME", help="a cluster that is not here, to compile module:name for")
    add("--json", metavar="FILE", help="write the report to FILE; - for here")
    add("--plot", type=Path, metavar="FILE", help="draw the schedule, as in a.png")


def run(args: argparse.Namespace) -> int:
    """Read or compile, and show; the exit status."""
    try:
        check_results(args.json)
        if args.plot:
            check_writable("--plot", args.plot)
        with patience(f"compiling{f' for {args.topology}' if args.topology else ''}"):
            report = _report(args.target, args)
            other = _report(args.against, args) if args.against else None
        shown = report.to_dict() | ({"against": other.to_dict()} if other else {})
        text = json.dumps(shown, indent=1)
        if args.plot:
            write_result("--plot", args.plot, report.plot)
    except ImportError as error:
        raise ValueError(str(error)) from error  # matplotlib is missing
    write_lines(args.json, text + "\n")
    if args.json == "-":
        return 0
    if other:
        print(side_by_side({_named(args.target): report, _named(args.against): other}))
    else:
        print(report.text(terminal_width() or WIDTH))
    return 0


def _named(target: str) -> str:
    """A target without the folders or packages that it is in."""
    module, colon, name = target.rpartition(":")
    is_file = Path(target).is_file() or not colon
    return PurePath(target).name if is_file else f"{module.rpartition('.')[2]}:{name}"


def _report(target: str, args: argparse.Namespace) -> Report:
    module, colon, name = target.rpartition(":")
    if Path(target).is_dir():
        raise ValueError(f"{target} is a folder; give a file of HLO text, or module:name.")
    if not colon and not Path(target).exists():
        stem = PurePath(target).stem if target.endswith(".py") else target
        raise ValueError(
            f"No such file: {target!r}. A function is named with its module, as in "
            f"{stem.replace('/', '.')}:step."
        )
    if Path(target).is_file() or not colon:
        if args.topology:
            raise ValueError("--topology is for module:name; a file is compiled already.")
        if target.endswith(".py"):
            raise ValueError(
                f"{target} is a program's source, not HLO text. A function is named with its "
                f"module, as in {PurePath(target).stem}:step."
            )
        text = Path(target).read_text(encoding="utf-8", errors="replace")
        return report_of(text)
    import jax

    from jaxcoll._inspect import inspect

    if args.platform == "cpu":
        check_least(args, 1, "devices")
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices or SIMULATED)
    elif args.platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.platform, args.platform))
    fun, given, named = _asked_for(module, name, args.topology)
    # Whatever a user's function raises while it is traced, or a compiler while it compiles.
    with _explained(f"{target} cannot be compiled"):
        return inspect(fun, *given, topology=args.topology, **named)


def _asked_for(
    module: str, name: str, topology: str | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The program that module:name stands for, and its arguments."""
    sys.path.insert(0, "")
    # Importing runs the user's file, which may raise anything.
    with _explained(f"no {name!r} in {module!r}"):
        found = getattr(importlib.import_module(module), name)
    if hasattr(found, "example_args"):
        return found, tuple(found.example_args), dict(getattr(found, "example_kwargs", {}))
    if not callable(found):
        raise ValueError(f"{module}:{name} is not a function; it is {type(found).__name__}.")
    # A platform that is not here, for one, has errors of its own.
    with _explained(f"no mesh for {module}:{name}"):
        given = {"mesh": _mesh(topology)} if takes_mesh(found, {}) else {}
    alone = "with a `mesh` alone" if given else "without arguments"
    with _explained(f"{module}:{name} has no `example_args`, and cannot be called {alone}"):
        made = found(**given)
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
def _explained(what: str) -> Iterator[None]:
    """Any error as one line behind `what`, with its type where its words alone do not say it."""
    try:
        yield
    except Exception as error:
        words = shortened(" ".join(str(error).split()), 400)
        known = isinstance(error, ValueError | OSError) and words
        words = words if known else f"{type(error).__name__}: {words}"
        raise ValueError(f"{what}: {words}") from error
