"""The command line: `jaxcoll` and `python -m jaxcoll`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import jaxcoll
from jaxcoll.errors import LaunchError

COMMANDS = {
    "demo": "train on real data over several devices; show what is sent",
    "plan": "show what a tree would send and what that would take, for a cluster you do not have",
    "inspect": "show what a program will send, before it runs: requested beside compiled",
    "launch": "run a program in several processes on this host",
    "doctor": "look over this machine, or a running job: what to fix",
    "bench": "measure all-reduces beside JAX's own",
}
"""Each command with its help; its module has `add_arguments(parser)` and `run(arguments)`."""

READER_LEFT = 141
"""The exit status when the reader, such as `head`, has read enough: as after a SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 2, with one line on standard error, for what cannot be."""
    command = ""
    try:
        arguments = parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
        command = arguments.command
        status = _module(command).run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard()
        return READER_LEFT
    except KeyboardInterrupt:
        return _complain(command, "interrupted.", 130)
    except LaunchError as error:  # with the traceback of a process
        return _complain(command, str(error), 2)
    except (ValueError, OSError, ImportError) as error:
        _discard()
        return _complain(command, " ".join(str(error).split()), 2)


def _discard() -> None:
    """Drop what standard output cannot take: Python flushes it once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(command: str, words: str, status: int) -> int:
    print(f"jaxcoll {command}".rstrip() + f": {words}", file=sys.stderr, flush=True)
    return status


class _Parser(argparse.ArgumentParser):
    """Each command refuses flags that it lacks itself, and names the nearest of its own."""

    def parse_known_args(self, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        known, unknown = super().parse_known_args(*given)
        if unknown:
            own = [flag for action in self._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], own, 1)
            nearest = f"; nearest: {close[0]}" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest}")
        return known, unknown


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, and the flags of the one that is named: the others' modules take their time."""
    whole = _Parser(prog="jaxcoll", description=jaxcoll.__doc__)
    whole.add_argument("--version", action="version", version=f"jaxcoll {jaxcoll.__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.".capitalize())
        if name in words[:1]:
            _module(name).add_arguments(command)
    return whole


def _module(command: str) -> Any:
    return importlib.import_module(f"jaxcoll.cli.{command}")
