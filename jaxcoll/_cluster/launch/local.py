"""Several processes on this host that form one JAX world over Gloo, started and surely ended."""

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
from jaxcoll._cluster.launch.supervisor import run_job
from jaxcoll._cluster.launchers import COORDINATOR, PROCESSES, RANK


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


class LaunchError(RuntimeError):
    """A process failed, or the time was up; the message ends with the last lines of its log."""


def launch(
    command: Sequence[str],
    processes: int,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run `processes` copies of `command` to their end; each calls `join` to enter the world.

    Args:
      command: what to run, as for `subprocess`.
      processes: how many; each has one CPU device unless it says otherwise.
      timeout: seconds after which all of them are killed.
      env: more environment variables.

    Returns:
      One `Ended` a process, in rank order.

    Raises:
      LaunchError: one ended with a status other than 0, or the time was up. All others were
        killed by then: no process outlives this call.
    """
    logs = [bytearray() for _ in range(processes)]
    with world(processes) as variables:
        told = [{**(env or {}), **each} for each in variables]
        outcome = run_job(
            command, told, lambda rank, stream, line: logs[rank].extend(line),
            timeout=timeout, grace=0,
        )  # fmt: skip
    texts = [log.decode(errors="replace") for log in logs]
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
    """Enter the world that `launch` made, if it started this process; before any JAX work.

    Returns:
      Whether it did.
    """
    if RANK not in os.environ:
        return False
    jax.config.update("jax_platforms", "cpu")
    initialize()
    return True


KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""Environment variables by which glibc's malloc keeps what is freed.

XLA's CPU runtime allocates every result and all temporaries of every call anew, and glibc gives
large blocks back to the system at once: each call then takes fresh pages, which over Gloo cost as
much as the exchange (docs/performance.md). Other C libraries do not read these variables.
"""


@contextlib.contextmanager
def world(processes: int, log: Any = subprocess.DEVNULL) -> Iterator[list[dict[str, str]]]:
    """A new world on this host, with its coordinator, at which nobody has arrived yet.

    The processes are made to keep their memory, but where the user's own variables say otherwise.

    Args:
      processes: how many are to arrive.
      log: a file for what the coordinator says.

    Yields:
      Each rank's environment variables, by which it can `join`.
    """
    with coordinated(processes, log) as coordinator:
        yield world_variables(coordinator.address, processes)


def world_variables(address: str, processes: int) -> list[dict[str, str]]:
    """Each rank's environment variables, by which it finds the coordinator at an address."""
    common = {k: os.environ.get(k, v) for k, v in KEEP_MEMORY.items()}
    common |= {COORDINATOR: address, PROCESSES: str(processes)}
    return [{**common, RANK: str(rank)} for rank in range(processes)]


@contextlib.contextmanager
def coordinated(processes: int, log: Any = subprocess.DEVNULL) -> Iterator[Coordinator]:
    """A coordinator that listens on the loopback interface only.

    Args:
      processes: how many are to arrive.
      log: a file for what it says.

    Yields:
      The coordinator, which is ended afterwards.
    """
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
