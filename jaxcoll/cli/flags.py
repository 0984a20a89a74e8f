"""Flags that several commands have, each declared once."""

from __future__ import annotations

import argparse
from typing import Any

from jaxcoll.bench.devices import SIMULATED
from jaxcoll.bench.workloads import TREES

PLATFORMS = ("cpu", "gpu", "tpu", "auto")


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
