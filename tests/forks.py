"""Pythons that begin with modules imported: forks of a process that has imported them and no more.

To import JAX and what a command needs takes seconds, and a fork milliseconds.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from at_once import wait_for

import jaxcoll
from jaxcoll._job.launch.subprocesses import OF_A_LAUNCH
from jaxcoll.cli.main import COMMANDS

# Every request names what one fork does. Replies: who has begun, and who has ended with what.
SERVER = """
import gc, importlib, json, os, signal, sys, warnings
import jax
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for each in dir(module) if name == "jaxcoll" else ():  # whose names are imported when used
        getattr(module, each)
gc.collect()
gc.freeze()

living = set()

def reap(*_):
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            living.discard(ended[0])
            os.write(1, b"ended %d %d\\n" % (ended[0], os.waitstatus_to_exitcode(ended[1])))
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, reap)
for line in iter(sys.stdin.readline, ""):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads have nothing to do
        child = os.fork()
    if not child:
        break
    living.add(child)
    os.write(1, b"began %d\\n" % child)
else:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in living:  # unreaped from here on
        try:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(child, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError):
            pass
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.setsid()
code, sys.argv, folder, variables, out, err = json.loads(line)
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
jax.config.update("jax_platforms", variables.get("JAX_PLATFORMS"))
jax.config.update("jax_num_cpu_devices", int(variables.get("JAX_NUM_CPU_DEVICES", -1)))
quickly = "JAX_DISABLE_MOST_OPTIMIZATIONS" in variables
jax.config.update("jax_disable_most_optimizations", quickly)
waits = variables.get("JAX_ENABLE_PREEMPTION_SERVICE") != "false"
jax.config.update("jax_enable_preemption_service", waits)
for number, path in enumerate((os.devnull, out, err)):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
exec(code, {"__name__": "__main__"})
"""
MODULE = "import runpy; runpy.run_module('{}', run_name='__main__', alter_sys=True)"
COMMAND = MODULE.format("jaxcoll")
SCRIPT = """
import os, runpy, sys
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Python:
    """A Python of which each run is a fork.

    Args:
      modules: what it has imported.
      variables: the environment of its runs. Of what JAX reads when it is imported each has its
        own platform, number of CPU devices and optimizations.
      flags: of the interpreter.
    """

    def __init__(self, modules, variables, *flags):
        self.variables, self._began = variables, 0
        self._ended = {}
        self._server = subprocess.Popen(
            [sys.executable, *flags, "-c", SERVER, *modules],
            cwd=os.sep, env=variables, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        atexit.register(self._server.communicate)  # without more requests it ends

    def run(self, code, *words, cwd, timeout=240, **variables):
        """As `python -c code` in a folder, where `sys.argv` is `words`."""
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder) / name for name in ("out", "err")]
            own = {**self.variables, **variables}
            child = self.start(code, words, own, *streams, cwd=cwd)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                status = child.wait()
            out, err = (path.read_text("utf8", "replace") for path in streams)
        return subprocess.CompletedProcess([str(word) for word in words], status, out, err)

    def start(self, code, words, variables, out, err, cwd):
        """The same, which goes on by itself; what it prints is added to files."""
        asked = [code, [str(word) for word in words], str(cwd), variables, str(out), str(err)]
        self._server.stdin.write(json.dumps(asked).encode() + b"\n")
        self._began = 0
        while not self._began:
            self._read(None)
        return Child(self, self._began)

    def status(self, pid, seconds):
        """How a fork has ended; None: it has not, so many seconds from now."""
        until = None if seconds is None else time.monotonic() + seconds
        while pid not in self._ended:
            left = None if until is None else max(0, until - time.monotonic())
            if not self._read(left):
                return None
        return self._ended[pid]

    def _read(self, seconds):
        if not select.select([self._server.stdout], [], [], seconds)[0]:
            return False
        match self._server.stdout.readline().split():
            case [b"began", pid]:
                self._began = int(pid)
            case [b"ended", pid, status]:
                self._ended[int(pid)] = int(status)
            case _:
                raise RuntimeError("the process that forks has ended")
        return True


class Child:
    """One fork, like a `subprocess.Popen`."""

    def __init__(self, python, pid):
        self._python, self.pid = python, pid

    def poll(self):
        return self._python.status(self.pid, 0)

    def wait(self, timeout=None):
        status = self._python.status(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status


class Running:
    """Forks for commands that begin with `python`, like the package's own `Running`."""

    def __init__(self):
        self.processes = []

    def start(self, command, env, *, stdout, cwd=Path(), **_):
        """Start one more; `env` is added. Both streams go to a file, or each has a pipe."""
        if stdout is not subprocess.PIPE:
            log = Path(stdout.name).absolute()
            return self._fork(command, env, log, log, cwd)
        with tempfile.TemporaryDirectory() as folder:
            pipes = [Path(folder, name) for name in ("out", "err")]
            for pipe in pipes:
                os.mkfifo(pipe)
            child = self._fork(command, env, *pipes, cwd)
            child.stdout, child.stderr = (pipe.open("rb") for pipe in pipes)  # as soon as it has
        return child

    def _fork(self, command, env, out, err, cwd):
        _, *words = map(str, command)
        code, python = SCRIPT, with_jaxcoll
        if words[0] == "-c":
            code = words.pop(1)
        elif words[0] == "-m":
            code, python = MODULE.format(words.pop(1)), with_commands
        own = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
        child = python().start(code, words, {**own, **env}, out, err, cwd.absolute())
        self.processes.append(child)
        return child

    def signal(self, number):
        for child in self.processes:
            if child.poll() is None:
                os.killpg(child.pid, number)


@contextlib.contextmanager
def running():
    """Start processes in here: at the end all are killed, with those that they started."""
    started = Running()
    try:
        yield started
    finally:
        started.signal(signal.SIGKILL)
        for child in started.processes:
            child.wait()


@functools.cache
def with_jaxcoll():
    """What has imported jaxcoll."""
    return Python(("jaxcoll",), dict(os.environ))


def with_commands():
    """What has imported the commands, and what the demo needs; a warning ends it."""
    python = _with_commands()
    python.variables = {**os.environ, **_OWN}  # a test may have changed its own
    return python


_OWN = {
    "PYTHONPATH": str(Path(jaxcoll.__file__).parents[1]), "PYTHONUNBUFFERED": "", "COLUMNS": "100",
}  # fmt: skip


@functools.cache
def _with_commands():
    commands = (f"jaxcoll.cli.{name}" for name in ("main", *COMMANDS))
    others = ("matplotlib", "optax", "sklearn.datasets", "sklearn.model_selection")
    return Python(("jaxcoll", *commands, *others), {**os.environ, **_OWN}, "-W", "error")


def gone(pids):
    """True once none of these processes is left.

    A zombie has ended: only whoever inherited it has not looked yet.
    """
    wait_for(lambda: not any(map(_lives, pids)))
    return True


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
