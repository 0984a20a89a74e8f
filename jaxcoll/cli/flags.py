"""Flags that several commands have: declared, checked before the work, and carried out."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from jaxcoll._files import check_writable, write_text
from jaxcoll.bench.targets import SIMULATED
from jaxcoll.bench.workloads import TREES

PLATFORMS = ("cpu", "gpu", "tpu", "auto")
_PACKAGES = {"sklearn": "scikit-learn"}


def add_platform(parser: Any, *, default: str | None = "cpu", help: str = "") -> None:
    """`--platform`: whose devices."""
    words = "simulated CPU devices (default), or the accelerators that are here"
    parser.add_argument("--platform", choices=PLATFORMS, default=default, help=help or words)


def add_devices(parser: Any, help: str) -> None:
    """`--devices`: how many."""
    help = help.format(simulated=SIMULATED)
    parser.add_argument("--devices", type=int, metavar="N", help=help)


def check_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse flags that were given a number below `least`."""
    for name in names:
        number = getattr(args, name)
        if number is not None and number < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least {least}; got {number}.")


def add_tree(parser: argparse.ArgumentParser, *, several: bool = False) -> Any:
    """`--tree`, `--dtype` and `--reduce-op` in a group; `several`: any number of trees, or none."""
    group = parser.add_argument_group("what is reduced")
    each = f"{', '.join(TREES)}, or a FILE.json of [{{shape, dtype, name}}, ...]"
    if several:
        words = f"{each}; may be given several times (default: resnet50, unless --sizes is given)"
        group.add_argument("--tree", action="append", default=[], metavar="NAME", help=words)
    else:
        words = f"{each} (default: resnet50)"
        group.add_argument("--tree", default="resnet50", metavar="NAME", help=words)
    group.add_argument("--dtype", default="float32", help="of what does not say (default: float32)")
    group.add_argument("--reduce-op", choices=["mean", "sum"], default="mean")
    return group


def check_installed(extra: str, *modules: str, flag: str = "") -> None:
    """Refuse what needs a package that is not installed, and name the extra that brings it."""
    missing = [_PACKAGES.get(m, m) for m in modules if not importlib.util.find_spec(m)]
    if missing:
        raise ValueError(
            f"{flag} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: pip install 'jaxcoll[{extra}]'".lstrip()
        )


def check_results(json: str | None, plot: Path | None = None) -> None:
    """Find out before the work whether the files of --json and --plot can be written."""
    if plot is not None:
        if plot.suffix != ".png":
            raise ValueError(f"--plot: expected a name that ends in .png; got {plot}.")
        check_writable("--plot", plot)
    if json not in (None, "-"):
        check_writable("--json", Path(json))


def write_lines(json: str | None, text: str) -> None:
    """Write all of `text` or nothing to the file of --json; "-" is standard output."""
    if json == "-":
        sys.stdout.write(text)
    elif json is not None:
        write_text("--json", Path(json), text)
