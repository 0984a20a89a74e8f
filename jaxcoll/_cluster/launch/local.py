"""Launch several processes on this host that form one JAX world over Gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._cluster.coordinator import Coordinator, start_coordinator
from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.supervisor import Job, Owner
from jaxcoll._cluster.launchers import COORDINATOR, PROCESSES, RANK
from jaxcoll._errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended.

    Attributes:
      rank: its number in the world.
      status: its exit status; negative: the signal that ended it.
      log: what it printed, both streams together.
    """

    rank: int
    status: int
    log: str


class _Logs(Owner):
    """Keeps what each rank prints, both streams together."""

    def __init__(self, processes: int) -> None:
        self._logs = [bytearray() for _ in range(processes)]

    def show(self, rank: int, stream: str, piece: bytes) -> None:
        self._logs[rank] += piece

    def texts(self) -> list[str]:
        return [log.decode(errors="replace") for log in self._logs]


def launch(
    command: Sequence[str],
    processes: int,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run copies of `command` to their end, each of which calls `join`; the output of each."""
    # No process outlives this call, also where it raises LaunchError because one failed or the time
    # was up. Each process has one CPU device unless `env` says otherwise.
    logs = _Logs(processes)
    with world(processes) as variables:
        job = Job(command, [{**(env or {}), **each} for each in variables], logs)
        outcome = job.run(timeout, grace=0)
    texts = logs.texts()
    if outcome.failed:
        first = outcome.failed[0]
        raise LaunchError(
            f"process {first} of {processes} ended with status {outcome.statuses[first]}:\n"
            + _tail(texts[first])
        )
    if outcome.late:
        late = [rank for rank, status in enumerate(outcome.statuses) if status is None]
        raise LaunchError(
            f"processes {late} of {processes} did not end within {timeout:g} s:\n"
            + _tail(texts[late[0]])
        )
    return [Ended(rank, 0, text) for rank, text in enumerate(texts)]


def join() -> bool:
    """Enter the world of `launch`, before any JAX work; whether it started this process."""
    if RANK not in os.environ:
        return False
    jax.config.update("jax_platforms", "cpu")
    initialize()
    return True


@contextlib.contextmanager
def world(processes: int, log: Any = subprocess.DEVNULL) -> Iterator[list[dict[str, str]]]:
    """A coordinator on this host; yields each rank's environment variables, with which it joins."""
    with coordinated(processes, log) as coordinator:
        yield world_variables(coordinator.address, processes)


def world_variables(address: str, processes: int) -> list[dict[str, str]]:
    """Each rank's environment variables, by which it finds the coordinator at an address."""
    common = {COORDINATOR: address, PROCESSES: str(processes)}
    return [{**common, RANK: str(rank)} for rank in range(processes)]


def device_variables(platform: str, count: int, rank: int) -> dict[str, str]:
    """Variables for the devices of a process, and defaults that the user's own replace."""
    # JAX's preemption service would keep SIGTERM from ending a process.
    usual = {"PYTHONUNBUFFERED": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    if platform == "cpu":
        own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    else:
        ids = ",".join(str(rank * count + k) for k in range(count))
        own = {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": ids}
        # NCCL's processes on one host need no other interface to find each other.
        usual["NCCL_SOCKET_IFNAME"] = "lo"
    return {**{name: os.environ.get(name, value) for name, value in usual.items()}, **own}


@contextlib.contextmanager
def coordinated(processes: int, log: Any = subprocess.DEVNULL) -> Iterator[Coordinator]:
    """A coordinator that listens on the loopback interface only, and is ended afterwards."""
    coordinator = start_coordinator("127.0.0.1:0", processes, log=log)
    try:
        yield coordinator
    finally:
        coordinator.end()


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(log: str, lines: int = 30) -> str:
    return "\n".join(log.splitlines()[-lines:])
