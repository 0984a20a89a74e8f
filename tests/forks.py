"""Pythons that begin with modules imported: forks of a process that has imported them and no more.

To import JAX and what a command needs takes seconds, and a fork milliseconds.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jaxcoll

SERVER = """
import importlib, json, os, sys, warnings
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in iter(sys.stdin.readline, ""):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads have nothing to do
        child = os.fork()
    if not child:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
code, sys.argv, folder, variables, out, err = json.loads(line)
os.chdir(folder)
os.environ.update(variables)
for number, path in enumerate((os.devnull, out, err)):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
exec(code, {"__name__": "__main__"})
"""
COMMAND = "import runpy; runpy.run_module('jaxcoll', run_name='__main__', alter_sys=True)"
SCRIPT = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"


class Python:
    """A Python that a warning ends; each run is a fork of one process.

    Args:
      modules: what it has imported.
      variables: its environment; what JAX reads when it is imported can be set nowhere else.
    """

    def __init__(self, modules: tuple[str, ...], variables: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVER, *modules],
            cwd=os.sep, env=variables, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        atexit.register(self._server.communicate)  # without more requests it ends

    def run(
        self, code: str, *words: object, cwd: Path, timeout: float = 240, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """As `python -c code` in a folder, where `sys.argv` is `words`."""
        argv = [str(word) for word in words]
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder) / name for name in ("out", "err")]
            asked = [code, argv, str(cwd), variables, *map(str, streams)]
            self._server.stdin.write(json.dumps(asked).encode() + b"\n")
            child = int(self._server.stdout.readline())
            if not select.select([self._server.stdout], [], [], timeout)[0]:
                os.kill(child, signal.SIGKILL)
            status = int(self._server.stdout.readline())
            out, err = (path.read_text("utf8", "replace") for path in streams)
        return subprocess.CompletedProcess(argv, status, out, err)


@functools.cache
def with_commands() -> Python:
    """What has imported the commands, and what the demo needs."""
    modules = ("jaxcoll.cli.main", "jaxcoll.demos.picture", "jaxcoll.demos.report", "optax",
               "sklearn.datasets", "sklearn.model_selection")  # fmt: skip
    here = str(Path(jaxcoll.__file__).parents[1])
    own = {"PYTHONPATH": here, "PYTHONUNBUFFERED": "", "COLUMNS": "100"}
    return Python(modules, {**os.environ, **own})
