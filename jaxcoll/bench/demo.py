"""`jaxcoll demo`: train on real data over several devices, and show what they sent one another."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import jax

import jaxcoll as jc
from jaxcoll._host.files import replacing
from jaxcoll.bench.devices import SIMULATED, devices_of
from jaxcoll.bench.files import check_writable

_NEEDS = {"rich": "rich", "matplotlib": "matplotlib", "optax": "optax", "sklearn": "scikit-learn"}

EPILOG = """\
The exit status is 0; 1 when the trained parameters differ from one device's by more than 1e-4,
or when the default number of steps (or more) does not reach a test accuracy of 0.96; 2 when the
flags cannot be met.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
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
        "--steps", type=int, metavar="N", help="updates of the parameters (default: 600)"
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
    """
    try:
        _check_extras()
        steps, options, devices = _checked(args)
    except ValueError as error:
        print(f"jaxcoll demo: {error}", file=sys.stderr)
        return 2
    from jaxcoll.bench.demo_report import progress_bars, show
    from jaxcoll.bench.demonstration import demonstrate
    from jaxcoll.bench.picture import draw

    # An accelerator may round the factors of a matrix product to fewer bits, and would do so
    # differently for a share of the batch than for all of it.
    jax.config.update("jax_default_matmul_precision", "highest")
    with progress_bars(devices, steps) as progress:
        outcome = demonstrate(devices, steps, args.seed, options, progress)
    with replacing(_picture(args)) as partial:
        draw(outcome, partial)
    if args.json is not None:
        figures = {**outcome.to_dict(), "picture": str(_picture(args))}
        with replacing(args.json) as partial:
            partial.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(outcome, _picture(args))
    for shortfall in outcome.shortfalls():
        print(f"jaxcoll demo: {shortfall}", file=sys.stderr)
    return 1 if outcome.shortfalls() else 0


def _checked(
    args: argparse.Namespace,
) -> tuple[int, jc.CommunicationOptions, list[jax.Device]]:
    """What the flags ask for: everything that can be refused is refused before the work."""
    from jaxcoll.bench.demonstration import STEPS
    from jaxcoll.bench.digits import TRAINING_IMAGES

    steps = STEPS if args.steps is None else args.steps
    for flag, value, least in (("--steps", steps, 1), ("--seed", args.seed, 0)):
        if value < least:
            raise ValueError(f"{flag} must be at least {least}; got {value}.")
    options = jc.CommunicationOptions(bytes_per_pack=args.bytes_per_pack)
    if args.devices is not None and args.devices > TRAINING_IMAGES:
        raise ValueError(
            f"--devices {args.devices}: there are {TRAINING_IMAGES} images to train on, and each "
            "device needs one in each step."
        )
    for flag, file in (("--out", _picture(args)), ("--json", args.json)):
        if file is not None:
            check_writable(flag, file)
    return steps, options, devices_of(args.platform, args.devices)


def _picture(args: argparse.Namespace) -> Path:
    return args.out / "demo.png"


def _check_extras() -> None:
    missing = [name for module, name in _NEEDS.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ValueError(
            f"needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install 'jaxcoll[cli,train]'"
        )
