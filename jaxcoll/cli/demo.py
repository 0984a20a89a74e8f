"""`jaxcoll demo`: train on real data over several devices, and show what they sent one another."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import jax

import jaxcoll as jc
from jaxcoll._cluster.launch.local import join, world
from jaxcoll._cluster.launch.supervisor import Job
from jaxcoll._files import check_writable, write_result
from jaxcoll.bench.targets import devices_of
from jaxcoll.cli import flags
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
    add, number = parser.add_argument, {"type": int, "metavar": "N"}
    add("what", choices=["digits"], nargs="?", default="digits", help="default: digits")
    flags.add_platform(parser)
    flags.add_devices(
        parser, "how many (default: {simulated} simulated ones, or all accelerators; 1 a process)"
    )
    words = "start N CPU processes here, over Gloo, between which gradients are packed"
    add("--processes", **number, help=words)
    add("--steps", **number, default=600, help="updates of the parameters (default: 600)")
    words = "close a pack of gradients before it exceeds N bytes (default: decided automatically)"
    add("--bytes-per-pack", **number, default=0, help=words)
    add("--seed", **number, default=0, help="default: 0")
    add("--json", metavar="FILE", help="write all figures to FILE; - for here, in place of words")
    words = "where the picture goes (default: jaxcoll-out)"
    add("--out", type=Path, default=Path("jaxcoll-out"), metavar="DIR", help=words)


def run(args: argparse.Namespace) -> int:
    """Train, show, and write the picture; the exit status, as `EPILOG` has it."""
    picture = args.out / "demo.png"
    flags.check_installed("cli,train", "rich", "matplotlib", "optax", "sklearn")
    from jaxcoll.demos.digits import TRAINING_IMAGES

    flags.check_least(args, 1, "steps", "devices", "processes")
    flags.check_least(args, 0, "seed")
    check_writable("--out", picture)
    flags.check_results(args.json)
    if (args.devices or 1) * (args.processes or 1) > TRAINING_IMAGES:
        given = [f"--{name} {getattr(args, name)}" for name in ("processes", "devices")]
        asked = " ".join(flag for flag in given if not flag.endswith("None"))
        raise ValueError(
            f"{asked}: there are {TRAINING_IMAGES} images to train on, and each device needs one "
            "in each step."
        )
    options = jc.CommunicationOptions(bytes_per_pack=args.bytes_per_pack)
    if args.processes is None:
        return _train(args, devices_of(args.platform, args.devices), options, picture)
    if args.platform != "cpu":
        raise ValueError("--processes starts CPU processes; leave --platform out.")
    if not join():
        return _start(args)
    return _train(args, jax.devices(), options, picture)


def _train(
    args: argparse.Namespace,
    devices: list[jax.Device],
    options: jc.CommunicationOptions,
    picture: Path,
) -> int:
    from jaxcoll.demos.demonstration import demonstrate
    from jaxcoll.demos.picture import draw
    from jaxcoll.demos.report import progress, show

    to_stderr = args.json == "-"
    # An accelerator may round the factors of a matrix product to fewer bits, and would do so
    # differently for a share of the batch than for all of it.
    with (
        jax.default_matmul_precision("highest"),
        progress(devices, args.steps, to_stderr=to_stderr) as advance,
    ):
        outcome = demonstrate(devices, args.steps, args.seed, options, advance)
    if outcome is None:  # the first process shows it
        return 0
    write_result("--out", picture, functools.partial(draw, outcome))
    figures = {**outcome.to_dict(), "picture": str(picture)}
    flags.write_lines(args.json, json.dumps(figures, indent=2) + "\n")
    show(outcome, picture, to_stderr=to_stderr)
    for shortfall in outcome.shortfalls():
        complain("demo", shortfall)
    return 1 if outcome.shortfalls() else 0


def _start(args: argparse.Namespace) -> int:
    """This command in several processes, each of which has `--devices` devices."""
    asked = {name: getattr(args, name) for name in ("processes", "steps", "seed", "out", "json")}
    asked = {**asked, "bytes-per-pack": args.bytes_per_pack}
    given = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(args.devices or 1)}
    if (sys.stderr if args.json == "-" else sys.stdout).isatty():
        own["TTY_COMPATIBLE"] = "1"  # for rich, which writes to a pipe
    others: dict[int, list[str]] = {rank: [] for rank in range(1, args.processes)}

    def show(rank: int, stream: str, line: str) -> None:
        """Pass on what the first process prints; keep the rest for when another one fails."""
        if rank:
            others[rank].append(line)
        elif not line.startswith("[Gloo] Rank"):  # on standard output, where figures may be read
            print(line, end="", file=sys.stderr if stream == "err" else sys.stdout, flush=True)

    with world(args.processes) as variables:
        command = [sys.executable, "-m", "jaxcoll", "demo", args.what, *given]
        job = Job(command, [{**each, **own} for each in variables], show)
        job.run()
    if not job.failed:
        return 0
    rank = job.failed[0]
    status = job.statuses[rank] or 2
    if rank:
        last = "".join(others[rank]).splitlines()[-10:]
        complain("demo", "\n".join([f"process {rank} ended with status {status}:", *last]))
    return status if rank == 0 and status > 0 else 2
