"""`jaxcoll launch`: several processes of one program on this host, which all end together."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from jaxcoll._cluster.coordinator import Coordinator
from jaxcoll._cluster.launch.local import coordinated, world_variables
from jaxcoll._cluster.launch.output import Output
from jaxcoll._cluster.launch.subprocesses import signal_name
from jaxcoll._cluster.launch.supervisor import Job, Outcome, Owner
from jaxcoll._cluster.launchers import check_system
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
    add("--logs", type=Path, metavar="DIR", help="write what each prints to DIR/RANK.log as well")
    add("--timeout", type=float, metavar="S", help="end all after S seconds (default: never)")
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
    until = time.monotonic() + (args.timeout or float("inf"))
    with _logs(args.logs, args.processes) as logs, _noted() as signals:
        launch = _Launch(args, command, logs, until, signals)
        return launch.read_out(launch.run())


@dataclasses.dataclass
class _Launch(Owner):
    """What is to run, and to whom it speaks."""

    args: argparse.Namespace
    command: list[str]
    logs: list[FileIO]
    until: float
    signals: Sequence[int]

    def __post_init__(self) -> None:
        self._output = Output()
        self._restarts = 0
        self._coordinator: Coordinator | None = None
        self._is_coordinator_lost = False
        self.has_room = self._output.has_room

    def run(self) -> int:
        args, complain = self.args, self._output.complain
        while True:
            outcome = self._run_once()
            for rank in outcome.failed[:1] if not args.keep_going else outcome.failed:
                others = "" if args.keep_going else "; the others were ended"
                complain(
                    f"process {rank} of {args.processes} {_how(outcome.statuses[rank])}{others}."
                )
            if outcome.interrupted:
                complain(f"{signal_name(outcome.interrupted)}: all processes were ended.")
                return 128 + outcome.interrupted
            if outcome.late:
                complain(f"not all processes ended within {args.timeout:g} s; they were ended.")
                return 124
            if not outcome.failed or (args.keep_going and 0 in outcome.statuses):
                return 0
            if not (restart := self._restart()):
                status = outcome.statuses[outcome.failed[0]]
                assert status is not None
                return status if status > 0 else 128 - status
            complain(f"all {args.processes} are started again ({restart}).")

    def _run_once(self) -> Outcome:
        """One world, from its coordinator's start to its end."""
        args, self._is_coordinator_lost = self.args, False
        with coordinated(args.processes, *self.logs[-1:]) as self._coordinator:
            devices = args.platform, args.devices_per_process or 1
            variables = world_variables(self._coordinator.address, args.processes, *devices)
            job = Job(self.command, variables, self, keep_going=args.keep_going)
            return job.run(max(0.0, self.until - time.monotonic()))

    def read_out(self, status: int) -> int:
        """Wait for the reader of the output, but not after the job was to end; the exit status."""
        ending = self.signals or time.monotonic() > self.until
        until = time.monotonic() + 1 if ending else self.until
        before = len(self.signals)
        if self._output.drain(lambda: len(self.signals) > before or time.monotonic() > until):
            return status
        if ending:
            return status
        return 128 + self.signals[-1] if self.signals else 124

    def show(self, rank: int, stream: str, piece: bytes) -> None:
        self._output.show(rank, stream, piece)
        if self.logs:
            try:
                self.logs[rank].write(piece)
            except OSError as error:  # a full disk, say, ends no training
                self._output.complain(f"no more logs are kept: {error.strerror}.")
                self.logs.clear()

    def look(self) -> None:
        assert self._coordinator is not None
        status = self._coordinator.process.poll()
        # A coordinator that nobody needs any more ends with 0, and not before this.
        if status and not self._is_coordinator_lost:
            self._is_coordinator_lost = True
            how = f"the coordinator {_how(status)}"
            self._output.complain(f"{how}: JAX aborts every process without it.")

    def may_restart(self, rank: int, status: int) -> bool:
        alone = self.args.keep_going and not self._is_coordinator_lost
        if not alone or not (restart := self._restart()):
            return False
        self._output.complain(
            f"process {rank} of {self.args.processes} {_how(status)}; it is started again, to "
            f"rejoin the others ({restart})."
        )
        return True

    def _restart(self) -> str:
        """One restart more, in words; "" if there may be none."""
        if self._restarts == self.args.restarts:
            return ""
        self._restarts += 1
        return f"restart {self._restarts} of {self.args.restarts}"


def _command(args: argparse.Namespace) -> list[str]:
    """What each process runs. Every flag is checked here, before anything is started."""
    if args.processes < 1:
        raise ValueError(f"-n must be at least 1; got {args.processes}.")
    check_least(args, 1, "devices_per_process")
    check_least(args, 0, "restarts")
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout must be a number of seconds above 0; got {args.timeout}.")
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
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    return f"ended with status {status}"


@contextlib.contextmanager
def _logs(folder: Path | None, processes: int) -> Iterator[list[FileIO]]:
    """A file for each rank, and one for the coordinator; none without a folder."""
    with contextlib.ExitStack() as stack:
        files: list[FileIO] = []
        if folder is not None:
            paths = [folder / f"{name}.log" for name in (*range(processes), "coordinator")]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files = [stack.enter_context(path.open("wb", buffering=0)) for path in paths]
            except OSError as error:
                raise OSError(f"--logs {folder}: {error.strerror}.") from None
        yield files


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
