"""Run one job on this host: its coordinator, and its processes, which are sure to end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from jaxcoll._job.coordinator import start_coordinator
from jaxcoll._job.launch.subprocesses import (
    COORDINATOR,
    PROCESSES,
    RANK,
    REJOIN,
    Running,
    killed_on_exit,
)
from jaxcoll._job.timing import (
    GRACE_SECONDS,
    LAUNCHER_POLL_SECONDS,
    OUTPUT_SECONDS,
    SETTLE_SECONDS,
)

_LONGEST_LINE = 1 << 24  # characters
# The line that Gloo prints on the program's standard output when it has connected, or what is left
# of it if the threads of several devices print theirs at the same time
_GLOO = re.compile(
    r"\[Gloo\] Rank |[\d ]*(is connected to )?[\d ]*(peer ranks\. )?"
    r"Expected number of connected peer ranks is : \d+$"
)
_GLOOS_END = re.compile(r"\d*\n")


@dataclasses.dataclass
class Job:
    """One process for each set of environment variables."""

    command: Sequence[str]
    variables: Sequence[Mapping[str, str]]  # each rank's, added to this process's environment
    # Called with a rank, "out" or "err", and a line that it printed (a progress bar's line may end
    # with a carriage return). Each stream has its own thread, which reads no further meanwhile
    show: Callable[[int, str, str], None]
    keep_going: bool = False  # a process that fails does not end the others
    # Called with the rank and status of a process that failed while others run. Returns whether to
    # restart it so that it rejoins them
    may_restart: Callable[[int, int], bool] = lambda rank, status: False
    # Signals that this process has received. The first ends the job, a second one kills it at once
    signals: Sequence[int] = ()

    def __post_init__(self) -> None:
        # Each rank's exit status, or minus its signal; None: it runs, or the job stopped it
        self.statuses: list[int | None] = [None] * len(self.variables)
        self.failed: list[int] = []  # ranks that failed by themselves, in order
        self.is_late, self.interrupted = False, 0  # the job timed out; the signal that ended it
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed_at: dict[int, float] = {}
        self._readers: list[_Reader] = []

    def run(self, timeout: float | None = None) -> None:
        """Run the job to its end. No process outlives this call."""
        until = time.monotonic() + (math.inf if timeout is None else timeout)
        with killed_on_exit() as running:
            for rank in range(len(self.variables)):
                self._start(running, rank)
            while None in self.statuses and not self._must_end(until):
                time.sleep(LAUNCHER_POLL_SECONDS)
                self._note_ended()
                self._restart(running)
            self._terminate(running)
        self._wait_for_output(until)

    def _start(self, running: Running, rank: int, **more: str) -> None:
        process = running.start(
            self.command, {**self.variables[rank], **more},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._processes[rank] = process
        for stream, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            self._readers.append(_Reader(pipe, functools.partial(self.show, rank, stream)))

    def _must_end(self, until: float) -> bool:
        self.interrupted = self.signals[0] if self.signals else 0
        self.is_late = time.monotonic() > until
        failed = bool(self.failed) and not self.keep_going
        return failed or self.is_late or bool(self.interrupted)

    def _note_ended(self) -> None:
        new = []
        for rank, process in self._processes.items():
            if self.statuses[rank] is None and (status := process.poll()) is not None:
                self.statuses[rank] = status
                if status:
                    new.append(rank)
                    self._failed_at[rank] = time.monotonic()
        # Killed ones first: a process that aborts usually does so because of another.
        killed = {rank for rank in new if self.statuses[rank] in (-signal.SIGKILL, -signal.SIGSEGV)}
        self.failed += sorted(new, key=lambda rank: (rank not in killed, rank))

    def _restart(self, running: Running) -> None:
        """Restart failed processes that `may_restart`, if others run that they can rejoin."""
        # Once one has finished, the others soon will: a restarted one could not rejoin.
        if None not in self.statuses or 0 in self.statuses:
            return
        for rank, at in list(self._failed_at.items()):
            status = self.statuses[rank]
            if status is not None and time.monotonic() > at + SETTLE_SECONDS:
                del self._failed_at[rank]
                if self.may_restart(rank, status):
                    self.failed.remove(rank)
                    self.statuses[rank] = None
                    self._start(running, rank, **{REJOIN: "1"})

    def _terminate(self, running: Running) -> None:
        """Signal all processes, and give them time to end, unless another signal comes."""
        before, until = len(self.signals), time.monotonic() + GRACE_SECONDS
        running.signal(self.interrupted or signal.SIGTERM)
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > until or len(self.signals) > before:
                return
            time.sleep(LAUNCHER_POLL_SECONDS)

    def _wait_for_output(self, until: float) -> None:
        """Wait until all output is shown, but not for a process that has left the group."""
        soon, before = time.monotonic() + OUTPUT_SECONDS, len(self.signals)
        is_ended = self.is_late or self.interrupted
        for reader in self._readers:
            while reader.is_alive() and (reader.is_showing or time.monotonic() < soon):
                if time.monotonic() > (soon if is_ended else until) or len(self.signals) > before:
                    if not is_ended:
                        self._must_end(until)  # records the reason
                    return
                reader.join(0.01)


class _Reader(threading.Thread):
    """A thread that shows the output of a pipe, line by line, until its end."""

    def __init__(self, pipe: IO[bytes], show: Callable[[str], None]) -> None:
        super().__init__(name="jaxcoll-output", daemon=True)
        self._pipe, self.show = pipe, show
        self.is_showing = False
        self.start()

    def run(self) -> None:
        with io.TextIOWrapper(self._pipe, "utf-8", "replace", newline="") as lines:
            unended = 0  # lines of Gloo that began in one line; their ends are the next
            while line := lines.readline(_LONGEST_LINE):
                if _GLOO.match(line) or (unended and _GLOOS_END.fullmatch(line)):
                    unended = max(0, unended + line.count("[Gloo]") - 1)
                    continue
                unended = 0
                self.is_showing = True
                self.show(line if line.endswith(("\n", "\r")) else f"{line}\n")
                self.is_showing = False


@contextlib.contextmanager
def world(
    processes: int, platform: str = "", count: int = 0, log: Any = subprocess.DEVNULL
) -> Iterator[tuple[list[dict[str, str]], Callable[[], bool]]]:
    """Run a coordinator on the loopback interface.

    Yields:
      Each rank's environment variables, and a function that returns whether a process has arrived.
    """
    with contextlib.closing(start_coordinator("127.0.0.1:0", processes, log=log)) as coordinator:
        variables = world_variables(coordinator.address, processes, platform, count)
        yield variables, coordinator.has_arrivals


def world_variables(
    address: str, processes: int, platform: str = "", count: int = 0
) -> list[dict[str, str]]:
    """Make each rank's environment variables for the coordinator at `address`.

    If a platform is given, they also set up `count` devices of it.
    """
    common = {COORDINATOR: address, PROCESSES: str(processes)}
    return [
        {**common, RANK: str(rank), **_device_variables(platform, count, rank)}
        for rank in range(processes)
    ]


def _device_variables(platform: str, count: int, rank: int) -> dict[str, str]:
    if not platform:
        return {}
    # JAX's preemption service would keep SIGTERM from ending a process.
    defaults = {"PYTHONUNBUFFERED": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    if platform == "cpu":
        settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    else:
        ids = ",".join(str(rank * count + k) for k in range(count))
        settings = {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": ids}
        # On one host, the loopback interface is all that NCCL needs.
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    return {**{name: os.environ.get(name, value) for name, value in defaults.items()}, **settings}
