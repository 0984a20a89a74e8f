"""Start processes that certainly end, however the one that started them ends."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COORDINATOR, PROCESSES, RANK = "JAXCOLL_COORDINATOR", "JAXCOLL_PROCESSES", "JAXCOLL_RANK"
"""Set by `jaxcoll launch`, which already runs a coordinator, for the processes that it starts."""

REJOIN = "JAXCOLL_REJOIN"
"""Set to "1" by `jaxcoll launch` for a process that is started again while the others go on."""

OF_A_LAUNCH = (COORDINATOR, PROCESSES, RANK, REJOIN)
"""Variables that a job inside a job must not inherit."""

# Leads the group. Its standard input ends when the process that started it does, however that was.
_LEADER = "trap '' HUP INT TERM; read -r _; kill -s KILL 0"


def check_system() -> None:
    """Refuse to start processes on Windows."""
    if platform.system() == "Windows":
        raise OSError(
            "several processes need Linux or macOS: JAX has no collectives between CPU processes "
            "on Windows. One process with simulated devices works there "
            "(`jax.config.update('jax_num_cpu_devices', 8)`), and WSL 2 is Linux."
        )


def signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


class Running:
    """The processes of a `surely_ended`, in the order in which they were started."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start one more; `env` is added to the environment, `streams` are `Popen`'s."""
        # This process may itself belong to a job, which its children must not enter.
        own = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
        process: subprocess.Popen[Any] = subprocess.Popen(
            command, env={**own, **env}, process_group=self._group, **streams
        )
        self.processes.append(process)
        return process

    def signal(self, number: int) -> None:
        """Send a signal to all of them that run, and to the processes that they started."""
        os.killpg(self._group, number)


@contextlib.contextmanager
def surely_ended() -> Iterator[Running]:
    """Start processes in here: at the end all are killed, with those that they started.

    They are one process group, led by a shell that outlives them and is waited for last: until
    then the system gives the group's number to nobody else, and no other number is signalled.
    Processes that they start and that leave the group escape.

    Yields:
      What starts them.
    """
    check_system()
    with subprocess.Popen(
        ["/bin/sh", "-c", _LEADER], stdin=subprocess.PIPE, process_group=0
    ) as leader:
        running = Running(leader.pid)
        try:
            yield running
        finally:
            running.signal(signal.SIGKILL)
            for process in running.processes:
                process.kill()  # it may have left the group; one that is reaped gets no signal
                process.wait()
