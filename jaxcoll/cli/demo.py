"""`jaxcoll demo`: train on real data over several devices, and show what they sent one another."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import jax

import jaxcoll as jc
from jaxcoll._files import check_writable, write_result, write_text
from jaxcoll.bench.devices import SIMULATED, devices_of
from jaxcoll.cli.results import check_installed
from jaxcoll.cli.streams import complain

EPILOG = """\
digits: a small network on handwritten digits, and the parameters beside those of one device.
In the source tree, docs/examples/gpt.py trains a small GPT in five ways to exchange gradients.

The exit status is 0; 1 when parameters differ from one device's by more than 1e-4, or when the
default number of steps (or more) does not reach a test accuracy of 0.96; 2 with one line on
standard error when the flags cannot be met or a result cannot be written; 130 after Ctrl-C.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what", choices=["digits"], nargs="?", default="digits", help="default: digits"
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
        "--steps",
        type=int,
        default=600,
        metavar="N",
        help="updates of the parameters (default: 600)",
    )
    parser.add_argument(
        "--bytes-per-pack",
        type=int,
        default=0,
        metavar="N",
        help="close a pack of gradients before it exceeds N bytes (default: decided automatically)",
    )
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
    picture = args.out / "demo.png"
    check_installed("cli,train", "rich", "matplotlib", "optax", "sklearn")
    from jaxcoll.demos.demonstration import demonstrate
    from jaxcoll.demos.digits import TRAINING_IMAGES
    from jaxcoll.demos.picture import draw
    from jaxcoll.demos.report import progress, show

    for flag, value, least in (("--steps", args.steps, 1), ("--seed", args.seed, 0)):
        if value < least:
            raise ValueError(f"{flag} must be at least {least}; got {value}.")
    for flag, file in (("--out", picture), ("--json", args.json)):
        if file is not None:
            check_writable(flag, file)
    if args.devices is not None and args.devices > TRAINING_IMAGES:
        raise ValueError(
            f"--devices {args.devices}: there are {TRAINING_IMAGES} images to train on, and each "
            "device needs one in each step."
        )
    options = jc.CommunicationOptions(bytes_per_pack=args.bytes_per_pack)
    devices = devices_of(args.platform, args.devices)
    # An accelerator may round the factors of a matrix product to fewer bits, and would do so
    # differently for a share of the batch than for all of it.
    with jax.default_matmul_precision("highest"), progress(devices, args.steps) as advance:
        outcome = demonstrate(devices, args.steps, args.seed, options, advance)
    write_result("--out", picture, functools.partial(draw, outcome))
    if args.json is not None:
        figures = {**outcome.to_dict(), "picture": str(picture)}
        write_text("--json", args.json, json.dumps(figures, indent=2) + "\n")
    show(outcome, picture)
    for shortfall in outcome.shortfalls():
        complain("demo", shortfall)
    return 1 if outcome.shortfalls() else 0
