"""Run one job on this host: its coordinator, and its processes to their certain end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from jaxcoll._cluster.coordinator import start_coordinator
from jaxcoll._cluster.launch.subprocesses import (
    COORDINATOR,
    PROCESSES,
    RANK,
    REJOIN,
    Running,
    surely_ended,
)

_GRACE_SECONDS = 5.0  # between asking processes to end and killing them
_SETTLE_SECONDS = 4.0  # after which survivors of a failure know whether they can go on
_OUTPUT_SECONDS = 1.0  # for the last output of a job that was ended
_POLL_SECONDS = 0.05
_LONGEST_LINE = 1 << 24  # characters
# Of the line in which Gloo says on standard output, amid a program's own, that it has connected
_GLOO = "[Gloo] Rank "


@dataclasses.dataclass
class Job:
    """One process for each set of environment variables, which are added to this process's."""

    command: Sequence[str]
    variables: Sequence[Mapping[str, str]]  # of each rank
    # Called with a rank, "out" or "err", and a line that it printed, or what a progress bar drew up
    # to a return. Each stream has a thread that calls it, and is not read meanwhile
    show: Callable[[int, str, str], None]
    keep_going: bool = False  # a process that fails does not end the others
    # Called with the rank and the status of a process that failed while others run: shall it be
    # started again, to rejoin them?
    may_restart: Callable[[int, int], bool] = lambda rank, status: False
    # That came to this process so far. The first ends the job, a second one does not wait
    signals: Sequence[int] = ()

    def __post_init__(self) -> None:
        # The exit status of each rank, or minus the signal that ended it; None: the job ended it
        self.statuses: list[int | None] = [None] * len(self.variables)
        self.failed: list[int] = []  # the ranks that failed by themselves, the first one first
        self.is_late, self.interrupted = False, 0  # the time was up; the signal that ended the job
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed_at: dict[int, float] = {}
        self._readers: list[_Reader] = []

    def run(self, timeout: float | None = None) -> None:
        """Run it to its end; no process outlives this call."""
        until = time.monotonic() + (math.inf if timeout is None else timeout)
        with surely_ended() as running:
            for rank in range(len(self.variables)):
                self._start(running, rank)
            while None in self.statuses and not self._must_end(until):
                time.sleep(_POLL_SECONDS)
                self._note_ended()
                self._restart(running)
            self._ask_to_end(running)
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
        # The killed ones first: a process that aborts most often does so because of another.
        killed = {rank for rank in new if self.statuses[rank] in (-signal.SIGKILL, -signal.SIGSEGV)}
        self.failed += sorted(new, key=lambda rank: (rank not in killed, rank))

    def _restart(self, running: Running) -> None:
        """Restart failed processes that may be, if others run whom they can rejoin."""
        # Once one has finished, the others are about to: there would be nobody to rejoin.
        if None not in self.statuses or 0 in self.statuses:
            return
        for rank, at in list(self._failed_at.items()):
            status = self.statuses[rank]
            if status is not None and time.monotonic() > at + _SETTLE_SECONDS:
                del self._failed_at[rank]
                if self.may_restart(rank, status):
                    self.failed.remove(rank)
                    self.statuses[rank] = None
                    self._start(running, rank, **{REJOIN: "1"})

    def _ask_to_end(self, running: Running) -> None:
        """Give processes time to end by themselves; another signal takes it from them."""
        before, until = len(self.signals), time.monotonic() + _GRACE_SECONDS
        running.signal(self.interrupted or signal.SIGTERM)
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > until or len(self.signals) > before:
                return
            time.sleep(_POLL_SECONDS)

    def _wait_for_output(self, until: float) -> None:
        """Wait for whoever reads the output, but not for a process that left the group."""
        soon, before = time.monotonic() + _OUTPUT_SECONDS, len(self.signals)
        is_ended = self.is_late or self.interrupted
        for reader in self._readers:
            while reader.is_alive() and (reader.is_showing or time.monotonic() < soon):
                if time.monotonic() > (soon if is_ended else until) or len(self.signals) > before:
                    if not is_ended:
                        self._must_end(until)  # which notes why
                    return
                reader.join(0.01)


class _Reader(threading.Thread):
    """Shows what comes out of a pipe, line by line, until its end."""

    def __init__(self, pipe: IO[bytes], show: Callable[[str], None]) -> None:
        super().__init__(name="jaxcoll-output", daemon=True)
        self._pipe, self.show = pipe, show
        self.is_showing = False
        self.start()

    def run(self) -> None:
        with io.TextIOWrapper(self._pipe, "utf-8", "replace", newline="") as lines:
            while line := lines.readline(_LONGEST_LINE):
                if line.startswith(_GLOO):
                    continue
                self.is_showing = True
                self.show(line if line.endswith(("\n", "\r")) else f"{line}\n")
                self.is_showing = False


@contextlib.contextmanager
def world(
    processes: int, platform: str = "", count: int = 0, log: Any = subprocess.DEVNULL
) -> Iterator[tuple[list[dict[str, str]], Callable[[], bool]]]:
    """Run a coordinator on the loopback interface.

    Yields:
      Each rank's environment variables, and a function that is True once a process has joined.
    """
    with contextlib.closing(start_coordinator("127.0.0.1:0", processes, log=log)) as coordinator:
        variables = world_variables(coordinator.address, processes, platform, count)
        yield variables, coordinator.is_met


def world_variables(
    address: str, processes: int, platform: str = "", count: int = 0
) -> list[dict[str, str]]:
    """Return each rank's environment variables, by which it finds the coordinator at an address.

    With a platform also those by which it has `count` devices of it.
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
        own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    else:
        ids = ",".join(str(rank * count + k) for k in range(count))
        own = {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": ids}
        # NCCL's processes on one host need no other interface to find each other.
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    return {**{name: os.environ.get(name, value) for name, value in defaults.items()}, **own}
