"""Several processes on this host that form one JAX world over Gloo, started and surely ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

_COORDINATOR, _COUNT, _RANK = "JAXCOLL_COORDINATOR", "JAXCOLL_PROCESSES", "JAXCOLL_RANK"


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
    with tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder, surely_ended() as running:
        logs = [Path(folder) / f"{rank}.log" for rank in range(processes)]
        for log, variables in zip(logs, world(processes), strict=True):
            with log.open("wb") as out:
                running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **(env or {}), **variables},
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + timeout
        while any(p.poll() is None for p in running):
            if any(p.poll() for p in running) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        late = [rank for rank, p in enumerate(running) if p.poll() is None]
        failed = [rank for rank, p in enumerate(running) if p.poll()]
        if failed:
            status = running[failed[0]].returncode
            raise LaunchError(
                f"process {failed[0]} of {processes} ended with status {status}:\n"
                + _tail(logs[failed[0]])
            )
        if late:
            raise LaunchError(
                f"processes {late} of {processes} did not end within {timeout:g} s:\n"
                + _tail(logs[late[0]])
            )
        return [
            Ended(rank, running[rank].returncode, log.read_text(errors="replace"))
            for rank, log in enumerate(logs)
        ]


def join() -> bool:
    """Enter the world that `launch` made, if it started this process; before any JAX work.

    Returns:
      Whether it did.

    Raises:
      LaunchError: the port at which the processes were to meet is in use.
    """
    if _RANK not in os.environ:
        return False
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address, rank = os.environ[_COORDINATOR], int(os.environ[_RANK])
    if rank == 0:
        _check_free(address)
    jax.distributed.initialize(address, int(os.environ[_COUNT]), rank)
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


def world(processes: int) -> list[dict[str, str]]:
    """The environment variables by which each rank of a new world on this host can `join` it.

    They make the processes keep their memory, but where the user's own say otherwise.
    """
    common = {k: os.environ.get(k, v) for k, v in KEEP_MEMORY.items()}
    common |= {_COORDINATOR: f"127.0.0.1:{free_port()}", _COUNT: str(processes)}
    return [{**common, _RANK: str(rank)} for rank in range(processes)]


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _check_free(address: str) -> None:
    """Refuse a port in use, at which JAX itself may fail with no more than a signal."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(address.rpartition(":")[2])))
        except OSError as error:
            raise LaunchError(
                f"cannot listen at {address}, where the processes were to meet: "
                f"{error.strerror}. Run this again, which takes another port."
            ) from error


@contextlib.contextmanager
def surely_ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list for processes that lead sessions of their own; at the end all of them are killed."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in running:
            process.wait()


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
