"""`jaxcoll completion`: a script by which a shell completes commands and flags."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

EPILOG = """\
Bash: `source <(jaxcoll completion bash)`, in ~/.bashrc. Zsh: the same with zsh, in ~/.zshrc. The
script is made of this version's commands and flags and starts no Python when it completes.
"""

_SCRIPT = """\
_jaxcoll() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _jaxcoll jaxcoll
"""

_FOR_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=["bash", "zsh"], help="whose script")


def run(args: argparse.Namespace) -> int:
    """Print the script; the exit status."""
    # Not by an import statement: `main` knows all commands, and this is one of them.
    parser = importlib.import_module("jaxcoll.cli.main").parser()
    commands = next(a.choices for a in parser._actions if isinstance(a.choices, dict))
    cases = "\n".join(case for name in commands for case in _cases(name, commands[name]))
    script = _SCRIPT.format(commands=" ".join(commands), cases=cases)
    print(_FOR_ZSH * (args.shell == "zsh") + script, end="")
    return 0


def _cases(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """What may follow each flag that takes a value, and then what may follow anything else."""
    actions = [a for a in parser._actions if a.help is not argparse.SUPPRESS]
    for action in actions:
        if action.option_strings and action.nargs != 0:
            patterns = "|".join(f'"{command} {flag}"' for flag in action.option_strings)
            yield f'      {patterns}) words="{" ".join(action.choices or ())}" ;;'
    flags = [flag for a in actions for flag in a.option_strings]
    places = [str(c) for a in actions if not a.option_strings for c in a.choices or ()]
    yield f'      {command}\\ *) words="{" ".join([*places, *flags])}" ;;'
