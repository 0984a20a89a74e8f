"""The command line: `jaxcoll` and `python -m jaxcoll`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import jaxcoll
from jaxcoll.cli.streams import READER_LEFT, broken_output, complain, open_closed_streams

COMMANDS = {
    "demo": ("jaxcoll.cli.demo", "train on real data over several devices; show what is sent"),
    "plan": (
        "jaxcoll.cli.plan_command",
        "show what a tree would send and what that would take, for a cluster you do not have",
    ),
    "inspect": (
        "jaxcoll.cli.inspect_command",
        "show what a program will send, before it runs: requested beside compiled",
    ),
    "launch": ("jaxcoll.cli.launch_command", "run a program in several processes on this host"),
    "doctor": ("jaxcoll.cli.doctor", "look over this machine, or a running job: what to fix"),
    "bench": ("jaxcoll.cli.bench_command", "measure all-reduces beside JAX's own"),
    "completion": ("jaxcoll.cli.completion", "print what lets a shell complete commands and flags"),
}
"""Each command's module, which has `add_arguments(parser)` and `run(arguments)`; and its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the command and its flags; None: those of this process.

    Returns:
      The exit status: 0, or what the command's help says; 2 with one line on standard error for
      what cannot be done, a standard output that cannot be written included; 130 for Ctrl-C; 141
      where the reader of standard output has left.

    Raises:
      SystemExit: a flag is wrong, or --help was asked for.
    """
    open_closed_streams()
    command, status, failed = "", 2, None
    try:
        try:
            arguments = parser().parse_args(argv)
            command = arguments.command
            status = importlib.import_module(COMMANDS[command][0]).run(arguments)
        except (ValueError, OSError, SystemExit) as error:
            failed = error
        broken = broken_output(failed)
    except KeyboardInterrupt:
        broken_output()
        complain(command, "interrupted.")
        return 130
    if isinstance(broken, BrokenPipeError):
        return READER_LEFT
    if broken is not None:
        complain(command, f"standard output cannot be written: {broken.strerror}.")
    elif isinstance(failed, SystemExit):  # of a wrong flag, or --help
        raise failed
    elif failed is not None:
        complain(command, " ".join(str(failed).split()))
    return status if broken is None else 2


def parser() -> argparse.ArgumentParser:
    """All commands, with their flags."""
    whole = argparse.ArgumentParser(prog="jaxcoll", description=jaxcoll.__doc__)
    whole.add_argument("--version", action="version", version=f"jaxcoll {jaxcoll.__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.".capitalize())
        importlib.import_module(module).add_arguments(command)
    return whole
