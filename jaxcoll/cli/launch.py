"""`jaxcoll launch`: run several processes of one program on this host, and end them together."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from jaxcoll._job.launch.subprocesses import check_system, signal_name
from jaxcoll._job.launch.supervisor import Job, world
from jaxcoll.cli.flags import add_hang, hang_command, minimum

EPILOG = """\
The program calls `jc.initialize()` first. The processes use 127.0.0.1, and other machines cannot
reach them; on several hosts, use the cluster's launcher instead. Each line of standard output and
error is printed with "[rank] " in front. When a process fails, the others get a SIGTERM, and are
killed five seconds later; Ctrl-C is passed on as it is, with the same limit. The exit status is
that of the first process that failed, or 128 + n if signal n ended it; 124 after
--timeout-seconds; 130 for Ctrl-C; 2, with one line on standard error, if nothing can be started.
With --keep-going it is 0 if any process ended with 0. With --restarts N, the whole job is restarted
when a process fails, and continues from its own checkpoint. With --keep-going as well, only the
failed process is restarted, and rejoins the others while there are any.
"""


_APART = """\
the {n} processes did not join the job that was prepared for them. Unless they connected at an \
address of their own, each ran the whole program alone. To make them one job, begin it with \
`import jaxcoll as jc; jc.initialize()`, before any other use of JAX."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.usage = "jaxcoll launch [-n N] [flags] (script.py | -m module) [arguments ...]"
    add = parser.add_argument
    text = "processes (default: 2)"
    add("-n", "--processes", type=minimum(1), default=2, metavar="N", help=text)
    text = "simulated CPU devices, or GPUs, per process (default: 1)"
    add("--devices-per-process", type=minimum(1), default=1, metavar="K", help=text)
    text = "simulated CPU devices over Gloo (default), or this host's GPUs, K for each process"
    add("--platform", choices=["cpu", "gpu"], default="cpu", help=text)
    add("--logs", type=Path, metavar="DIR", help="also append each rank's output to DIR/RANK.log")
    text = "end all processes after S seconds (default: never)"
    add("--timeout-seconds", type=float, metavar="S", help=text)
    text = "let the others continue when a process fails, for programs that can do without it"
    add("--keep-going", action="store_true", help=text)
    text = "restart after failures, N times in total (default: 0)"
    add("--restarts", type=minimum(0), default=0, metavar="N", help=text)
    add_hang(parser)
    add("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="run a module")
    text = "the program and its arguments"
    add("program", nargs=argparse.REMAINDER, metavar="script.py ...", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the job to its end and return the exit status that `EPILOG` describes."""
    command = _command(args)
    check_system()
    with contextlib.ExitStack() as at_end:
        output = _Output(_logs(args.logs, args.processes, at_end))
        signals = at_end.enter_context(_note_signals())
        until = time.monotonic() + (args.timeout_seconds or float("inf"))
        # One supply for both kinds: of a single process that rejoins, and of the whole job.
        restarts = (f"restart {k} of {args.restarts}" for k in range(1, args.restarts + 1))

        def may_restart(rank: int, status: int) -> bool:
            if not args.keep_going or not (restart := next(restarts, "")):
                return False
            output.complain(
                f"process {rank} of {args.processes} {_how(status)}; restarting it, to rejoin the "
                f"others ({restart})."
            )
            return True

        while True:
            each = args.platform, args.devices_per_process
            with world(args.processes, *each, *output.logs[-1:]) as (variables, is_joined):
                job = Job(command, variables, output.show, args.keep_going, may_restart, signals)
                job.run(max(0.0, until - time.monotonic()))
                is_apart = args.processes > 1 and not is_joined()
            status = _status(args, job, output)
            if is_apart and not status and not job.failed:
                output.complain(_APART.format(n=args.processes))
            if not status or job.interrupted or job.is_late or not (restart := next(restarts, "")):
                return status
            output.complain(f"restarting all {args.processes} processes ({restart}).")


def _status(args: argparse.Namespace, job: Job, output: _Output) -> int:
    others = "" if args.keep_going else "; the others were ended"
    for rank in job.failed if args.keep_going else job.failed[:1]:
        output.complain(f"process {rank} of {args.processes} {_how(job.statuses[rank])}{others}.")
    if job.interrupted:
        output.complain(f"{signal_name(job.interrupted)}: all processes were ended.")
        return 128 + job.interrupted
    if job.is_late:
        limit = f"{args.timeout_seconds:g} s"
        output.complain(f"not all processes ended within {limit}; they were ended.")
        return 124
    if not job.failed or (args.keep_going and 0 in job.statuses):
        return 0
    status = job.statuses[job.failed[0]] or 0
    return status if status > 0 else 128 - status


def _command(args: argparse.Namespace) -> list[str]:
    if (limit := args.timeout_seconds) is not None and not 0 < limit < float("inf"):
        raise ValueError(f"--timeout-seconds must be a number above 0; got {limit}.")
    python = hang_command(args) or [sys.executable]
    if args.module:
        return [*python, "-m", *args.module]
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise ValueError("no program to run: give a script.py, or -m and a module.")
    if re.fullmatch(r"python[\d.]*", Path(program[0]).name):  # as mpirun needs it
        raise ValueError(f"the script runs with this Python: leave {program[0]!r} out.")
    if not Path(program[0]).exists():
        raise ValueError(f"there is no file {program[0]}.")
    return [*python, *program]


def _how(status: int | None) -> str:
    assert status is not None
    return f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"


class _Output:
    """Writes to standard output and error; a reader that stops reading does not block the job."""

    def __init__(self, logs: list[FileIO]) -> None:
        self.logs = logs
        self._complained = False
        self._files = {}
        locks: dict[tuple[int, ...], threading.Lock] = {}
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            stream.flush()
            number = stream.fileno()  # not Python's buffer: at exit Python waits for its lock
            lock = locks.setdefault(os.fstat(number)[1:3], threading.Lock())
            self._files[name] = number, lock

    def show(self, rank: int, stream: str, line: str) -> None:
        """Print a process's line and add it to its log; a failure to write does not end the job."""
        try:
            self._write(stream, f"[{rank}] {line}")
        except OSError as error:
            if stream == "out" and not self._complained and error.errno != errno.EPIPE:
                self._complained = True
                text = f"standard output cannot be written ({error.strerror})"
                self.complain(f"{text}; the job continues without it.")
        if self.logs:
            try:
                self.logs[rank].write(line.encode())
            except OSError as error:
                self.complain(f"logging stopped: {error.strerror}.")
                self.logs.clear()

    def complain(self, message: str) -> None:
        """Write the launcher's own message to standard error; wait at most a second for that."""

        def write() -> None:
            with contextlib.suppress(OSError):
                self._write("err", f"jaxcoll launch: {message}\n")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(1)

    def _write(self, stream: str, text: str) -> None:
        number, lock = self._files[stream]
        data = text.encode()
        with lock:
            while data:
                select.select((), (number,), ())  # another process may have made it non-blocking
                data = data[os.write(number, data) :]


def _logs(folder: Path | None, processes: int, at_end: contextlib.ExitStack) -> list[FileIO]:
    if folder is None:
        return []
    paths = [folder / f"{name}.log" for name in (*range(processes), "coordinator")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [at_end.enter_context(path.open("ab", buffering=0)) for path in paths]
    except OSError as error:
        raise OSError(f"--logs {folder}: {error.strerror}.") from None


@contextlib.contextmanager
def _note_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list, for the job to act on at a safe point."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # `nohup`
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
