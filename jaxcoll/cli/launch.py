"""`jaxcoll launch`: several processes of one program on this host, which all end together."""

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

from jaxcoll._cluster.launch.subprocesses import check_system, signal_name
from jaxcoll._cluster.launch.supervisor import Job, world
from jaxcoll.cli.flags import check_least

EPILOG = """\
The program calls `jc.initialize()` first. Each process is on 127.0.0.1 and nothing of it can be
reached from elsewhere; on several hosts, start the program with their own launcher. Standard output
and error are passed on line by line behind "[rank] ". When a process fails, the others are asked to
end (SIGTERM), and killed five seconds later; so it is with Ctrl-C, which they get as such. The exit
status is that of the first process that failed, 128 + n where signal n ended it; 124 when the time
was up; 130 for Ctrl-C; 2 with one line on standard error when nothing can be started. With
--keep-going it is 0 if any process ended with 0. With --restarts N the whole job is started again
when one fails, and goes on from its own checkpoint; with --keep-going as well, a process that
failed is started again alone, and rejoins the others, as long as there are any.
"""


_APART = """\
the {n} processes did not join the job that was prepared for them: unless they met at an address \
of their own, each ran the whole program alone. To make them one job, begin it with \
`import jaxcoll as jc; jc.initialize()`, before any other use of JAX."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.usage = "jaxcoll launch [-n N] [flags] (script.py | -m module) [arguments ...]"
    add = parser.add_argument
    add("-n", "--processes", type=int, default=2, metavar="N", help="(default: 2)")
    words = "simulated CPU devices, or GPUs, of each process (default: 1)"
    add("--devices-per-process", type=int, metavar="K", help=words)
    words = "simulated CPU devices over Gloo (default), or this host's GPUs, K for each process"
    add("--platform", choices=["cpu", "gpu"], default="cpu", help=words)
    add("--logs", type=Path, metavar="DIR", help="add what each prints to DIR/RANK.log as well")
    words = "end all after S seconds (default: never)"
    add("--timeout-seconds", type=float, metavar="S", help=words)
    words = "let the others run on when a process fails, for programs that can go on without it"
    add("--keep-going", action="store_true", help=words)
    words = "start what failed again, N times in all (default: 0)"
    add("--restarts", type=int, default=0, metavar="N", help=words)
    add("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="run a module")
    add("program", nargs=argparse.REMAINDER, metavar="script.py ...", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Start, pass on, and end; the exit status, as `EPILOG` has it."""
    command = _command(args)
    check_system()
    with contextlib.ExitStack() as at_end:
        output = _Output(_logs(args.logs, args.processes, at_end))
        signals = at_end.enter_context(_noted())
        until = time.monotonic() + (args.timeout_seconds or float("inf"))
        restarts = (f"restart {k} of {args.restarts}" for k in range(1, args.restarts + 1))

        def may_restart(rank: int, status: int) -> bool:
            if not args.keep_going or not (restart := next(restarts, "")):
                return False
            output.complain(
                f"process {rank} of {args.processes} {_how(status)}; it is started again, to "
                f"rejoin the others ({restart})."
            )
            return True

        while True:
            devices = args.platform, args.devices_per_process or 1
            with world(args.processes, *devices, *output.logs[-1:]) as (variables, is_joined):
                job = Job(command, variables, output.show, args.keep_going, may_restart, signals)
                job.run(max(0.0, until - time.monotonic()))
                is_apart = args.processes > 1 and not is_joined()
            status = _status(args, job, output)
            if is_apart and not status and not job.failed:
                output.complain(_APART.format(n=args.processes))
            if not status or job.interrupted or job.is_late or not (restart := next(restarts, "")):
                return status
            output.complain(f"all {args.processes} are started again ({restart}).")


def _status(args: argparse.Namespace, job: Job, output: _Output) -> int:
    """Say what went wrong; the exit status."""
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
    """Return each process's command. Every flag is checked here, before anything is started."""
    if args.processes < 1:
        raise ValueError(f"-n must be at least 1; got {args.processes}.")
    check_least(args, 1, "devices_per_process")
    check_least(args, 0, "restarts")
    if (limit := args.timeout_seconds) is not None and not 0 < limit < float("inf"):
        raise ValueError(f"--timeout-seconds must be a number above 0; got {limit}.")
    if args.module:
        return [sys.executable, "-m", *args.module]
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise ValueError("what is to run? Give a script.py, or -m and a module.")
    if re.fullmatch(r"python[\d.]*", Path(program[0]).name):  # as mpirun wants it
        raise ValueError(f"this Python runs the script already: leave {program[0]!r} out.")
    if not Path(program[0]).exists():
        raise ValueError(f"there is no file {program[0]}.")
    return [sys.executable, *program]


def _how(status: int | None) -> str:
    assert status is not None
    return f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"


class _Output:
    """Both standard streams, whose readers may stop without keeping the job from its end."""

    def __init__(self, logs: list[FileIO]) -> None:
        self.logs = logs
        self._complained = False
        self._files = {}
        locks: dict[tuple[int, ...], threading.Lock] = {}
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            stream.flush()
            number = stream.fileno()  # without Python's buffer, for whose lock it waits at exit
            lock = locks.setdefault(os.fstat(number)[1:3], threading.Lock())
            self._files[name] = number, lock

    def show(self, rank: int, stream: str, line: str) -> None:
        """Write a line of a process, here and in its log. What cannot be written ends no job."""
        try:
            self._write(stream, f"[{rank}] {line}")
        except OSError as error:
            if stream == "out" and not self._complained and error.errno != errno.EPIPE:
                self._complained = True
                words = f"standard output cannot be written ({error.strerror})"
                self.complain(f"{words}; the job goes on without it.")
        if self.logs:
            try:
                self.logs[rank].write(line.encode())
            except OSError as error:
                self.complain(f"no more logs are kept: {error.strerror}.")
                self.logs.clear()

    def complain(self, words: str) -> None:
        """Write a line of the launcher's own on standard error, as far as somebody reads it."""

        def write() -> None:
            with contextlib.suppress(OSError):
                self._write("err", f"jaxcoll launch: {words}\n")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(1)

    def _write(self, stream: str, text: str) -> None:
        number, lock = self._files[stream]
        data = text.encode()
        with lock:
            while data:
                select.select((), (number,), ())  # somebody may have made it non-blocking
                data = data[os.write(number, data) :]


def _logs(folder: Path | None, processes: int, at_end: contextlib.ExitStack) -> list[FileIO]:
    """A file for each rank, and one for the coordinator; none without a folder."""
    if folder is None:
        return []
    paths = [folder / f"{name}.log" for name in (*range(processes), "coordinator")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [at_end.enter_context(path.open("ab", buffering=0)) for path in paths]
    except OSError as error:
        raise OSError(f"--logs {folder}: {error.strerror}.") from None


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """The signals to end that came so far, on which the job acts where nothing is half done."""
    came: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # `nohup`
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
