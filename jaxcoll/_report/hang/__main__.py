"""`python -m jaxcoll._report.hang SECONDS [--exit] script.py ...`: run it and report its hangs."""

import os
import sys

from jaxcoll._report.hang.monitor import has_imported_jax, report_hangs
from jaxcoll._report.hang.report import say
from jaxcoll._report.profile.script import Script


def main(seconds: str, *command: str) -> int:
    """Run a program as Python does, and return its exit status."""
    end = command[0] == "--exit"
    try:
        script = Script(command[end:])
    except ValueError as error:
        say(str(error).removeprefix("--run").lstrip(" :"))
        return 2
    watch, process = report_hangs(float(seconds), end=end), os.getpid()
    status = script.run()
    if os.getpid() == process and not status:
        if not has_imported_jax():
            say("nothing was watched, because the program did not import JAX.")
        elif watch.is_alone():
            say("nothing was watched, because the program joined no job of several processes.")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
