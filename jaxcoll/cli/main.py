"""The command line: `jaxcoll` and `python -m jaxcoll`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jaxcoll
from jaxcoll.errors import LaunchError

COMMANDS = {
    "demo": "train a small network on several devices and show what they send",
    "plan": "predict the traffic and time of reducing a pytree, on any cluster",
    "inspect": "show a program's collectives: as requested, as compiled, as measured",
    "launch": "run a program in several processes on this host",
    "coordinator": "run a job's coordinator apart from its processes",
    "doctor": "check this machine or a job, and say what to fix",
    "bench": "benchmark all-reduce algorithms against one psum per array",
}
"""Each command with its help; its module has `add_arguments(parser)` and `run(arguments)`."""

READER_LEFT = 141
"""The exit status when the reader of a pipe, such as `head`, has closed it: as after a SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 2 after an error, in one line on standard error."""
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
    except LaunchError as error:  # its message includes a process's traceback
        return _complain(command, str(error), 2)
    except (ValueError, OSError, ImportError) as error:
        _discard()
        return _complain(command, " ".join(str(error).split()), 2)


def _discard() -> None:
    """Drop output that cannot be written: Python would flush it again at exit, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(command: str, message: str, status: int) -> int:
    print(f"jaxcoll {command}".rstrip() + f": {message}", file=sys.stderr, flush=True)
    return status


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        known, unknown = super().parse_known_args(*given)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            nearest = _nearest(unknown[0].partition("=")[0], flags)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest}")
        return known, unknown


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Make a parser of all commands; to save time, it imports only the module of `words[0]`."""
    whole = _Parser(prog="jaxcoll", description=jaxcoll.__doc__)
    whole.add_argument("--version", action="version", version=f"jaxcoll {jaxcoll.__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.".capitalize())
        if name in words[:1]:
            _module(name).add_arguments(command)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        nearest = _nearest(words[0], COMMANDS)
        whole.error(f"no command {words[0]!r}{nearest}; there are {', '.join(COMMANDS)}")
    return whole


def _nearest(word: str, known: Iterable[str]) -> str:
    return "".join(f"; nearest: {x}" for x in difflib.get_close_matches(word, list(known), 1))


def _module(command: str) -> Any:
    return importlib.import_module(f"jaxcoll.cli.{command}")
