"""The command line: `jaxcoll` and `python -m jaxcoll`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import jaxcoll

COMMANDS = {
    "demo": ("jaxcoll.bench.demo", "train on real data over several devices; show what is sent"),
    "plan": (
        "jaxcoll.bench.plan_command",
        "show what a tree would send and what that would take, for a cluster you do not have",
    ),
    "inspect": (
        "jaxcoll.bench.inspect_command",
        "show what a program will send, before it runs: requested beside compiled",
    ),
    "launch": ("jaxcoll.bench.launch_command", "run a program in several processes on this host"),
    "doctor": ("jaxcoll.bench.doctor", "look over this machine, or a running job: what to fix"),
    "bench": ("jaxcoll.bench.command", "measure all-reduces beside JAX's own"),
}
"""Each command's module, which has `add_arguments(parser)` and `run(arguments)`; and its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the command and its flags; None: those of this process.

    Returns:
      The exit status: 0, or what the command's help says.
    """
    parser = argparse.ArgumentParser(prog="jaxcoll", description=jaxcoll.__doc__)
    parser.add_argument("--version", action="version", version=f"jaxcoll {jaxcoll.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.".capitalize())
        importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(argv)
    try:
        status = importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read, as `head`, has read enough
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a program that SIGPIPE ended
    return status
