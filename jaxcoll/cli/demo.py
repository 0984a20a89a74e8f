"""`jaxcoll demo`: train on real data over several devices, and show what they sent one another."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxcoll as jc
from jaxcoll._files import check_writable, write_result, write_text
from jaxcoll.bench.devices import SIMULATED, devices_of
from jaxcoll.bench.terminal import complain

_NEEDS = {"rich": "rich", "matplotlib": "matplotlib", "optax": "optax", "sklearn": "scikit-learn"}

EPILOG = """\
digits: a small network on handwritten digits, and the parameters beside those of one device.
gpt: a small GPT on the source of Python's standard library, in every way to exchange gradients, and
each loss curve beside that of one device.

The exit status is 0; 1 when parameters (digits) or losses (gpt) differ from one device's by more
than 1e-4, or when the default number of steps (or more) does not reach a test accuracy of 0.96; 2
with one line on standard error when the flags cannot be met or a result cannot be written; 130
after Ctrl-C.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what", choices=["digits", "gpt"], nargs="?", default="digits", help="default: digits"
    )
    parser.add_argument(
        "--platform",
        choices=["cpu", "gpu", "tpu", "auto"],
        default="cpu",
        help="simulated CPU devices (default), or the accelerators that are here",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help=f"how many (default: {SIMULATED} simulated ones, or all accelerators)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="updates of the parameters (default: 600, gpt 100)"
    )
    parser.add_argument(
        "--bytes-per-pack",
        type=int,
        default=0,
        metavar="N",
        help="digits: close a pack of gradients before it exceeds N bytes (default: decided "
        "automatically)",
    )
    parser.add_argument("--modes", metavar="LIST", help="gpt: some of the ways (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("jaxcoll-out"),
        metavar="DIR",
        help="where the picture goes (default: jaxcoll-out)",
    )


def run(args: argparse.Namespace) -> int:
    """Train, show, and write the picture.

    Returns:
      The exit status; see `EPILOG`.

    Raises:
      ValueError: the flags cannot be met, or a result cannot be written.
    """
    picture = args.out / ("demo.png" if args.what == "digits" else f"{args.what}.png")
    _check_extras()
    # An accelerator may round the factors of a matrix product to fewer bits, and would do so
    # differently for a share of the batch than for all of it.
    jax.config.update("jax_default_matmul_precision", "highest")
    _check(args, picture)
    outcome, draw, show = _digits(args) if args.what == "digits" else _gpt(args)
    write_result("--out", picture, functools.partial(draw, outcome))
    if args.json is not None:
        figures = {**outcome.to_dict(), "picture": str(picture)}
        write_text("--json", args.json, json.dumps(figures, indent=2) + "\n")
    show(outcome, picture)
    for shortfall in outcome.shortfalls():
        complain("demo", shortfall)
    return 1 if outcome.shortfalls() else 0


def _check(args: argparse.Namespace, picture: Path) -> None:
    """Refuse what can be refused before the work."""
    for flag, value, least in (("--steps", args.steps, 1), ("--seed", args.seed, 0)):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}; got {value}.")
    for flag, file in (("--out", picture), ("--json", args.json)):
        if file is not None:
            check_writable(flag, file)


def _digits(args: argparse.Namespace) -> tuple[Any, Callable[..., None], Callable[..., None]]:
    """The outcome, what draws it, and what shows it."""
    from jaxcoll.demos.demo_report import progress_bars, show
    from jaxcoll.demos.demonstration import STEPS, demonstrate
    from jaxcoll.demos.digits import TRAINING_IMAGES
    from jaxcoll.demos.picture import draw

    if args.modes is not None:
        raise ValueError("--modes is for gpt; leave it out.")
    if args.devices is not None and args.devices > TRAINING_IMAGES:
        raise ValueError(
            f"--devices {args.devices}: there are {TRAINING_IMAGES} images to train on, and each "
            "device needs one in each step."
        )
    steps = STEPS if args.steps is None else args.steps
    options = jc.CommunicationOptions(bytes_per_pack=args.bytes_per_pack)
    devices = devices_of(args.platform, args.devices)
    with progress_bars(devices, steps) as progress:
        outcome = demonstrate(devices, steps, args.seed, options, progress)
    return outcome, draw, show


def _gpt(args: argparse.Namespace) -> tuple[Any, Callable[..., None], Callable[..., None]]:
    """Likewise."""
    from jaxcoll.demos.gpt_demo import STEPS, demonstrate
    from jaxcoll.demos.gpt_picture import draw
    from jaxcoll.demos.gpt_report import progress_bars, show
    from jaxcoll.demos.gpt_training import modes_of

    if args.bytes_per_pack:
        raise ValueError("--bytes-per-pack is for digits; leave it out.")
    modes = modes_of(args.modes)
    steps = STEPS if args.steps is None else args.steps
    devices = devices_of(args.platform, args.devices)
    with progress_bars(devices, list(modes), steps) as progress:
        outcome = demonstrate(devices, modes, steps, args.seed, progress)
    return outcome, draw, show


def _check_extras() -> None:
    missing = [name for module, name in _NEEDS.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ValueError(
            f"needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install 'jaxcoll[cli,train]'"
        )
