"""Start processes that are sure to end, however the process that started them ends."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COORDINATOR, PROCESSES, RANK = "JAXCOLL_COORDINATOR", "JAXCOLL_PROCESSES", "JAXCOLL_RANK"
"""Variables that `jaxcoll launch` sets for its processes. The first one alone says where a
coordinator runs that no process of the job started; the launcher numbers the processes."""

JOB = "JAXCOLL_JOB"
"""Variable with a job's own id, the same in all its processes, where the launcher sets none."""

REJOIN = "JAXCOLL_REJOIN"
"""Variable that `jaxcoll launch` sets to "1" for a process restarted while the others go on."""

OF_A_LAUNCH = (COORDINATOR, PROCESSES, RANK, REJOIN)
"""Variables that a job started inside another job must not inherit."""

# The group's leader. Its standard input closes when the process that started it ends in any way.
_LEADER = "trap '' HUP INT TERM; read -r _; kill -s KILL 0"


def check_system() -> None:
    """Raise OSError on Windows."""
    if platform.system() == "Windows":
        raise OSError(
            "several processes need Linux or macOS: on Windows, JAX has no collectives between CPU "
            "processes. Use one process with simulated devices "
            "(`jax.config.update('jax_num_cpu_devices', 8)`), or WSL 2."
        )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


class Running:
    """The processes of a `killed_on_exit` block, in the order in which they were started."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process. `env` extends the environment; `streams` are arguments of `Popen`."""
        # This process may itself belong to a job, which its children must not join.
        ours = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
        process: subprocess.Popen[Any] = subprocess.Popen(
            command, env={**ours, **env}, process_group=self._group, **streams
        )
        self.processes.append(process)
        return process

    def signal(self, number: int) -> None:
        """Send a signal to all running processes, and to those that they started."""
        os.killpg(self._group, number)


@contextlib.contextmanager
def killed_on_exit() -> Iterator[Running]:
    """Kill, on leaving this context, the processes started in it and those that they started.

    They form one process group. A shell leads it, outlives them and is reaped last: until then
    the operating system cannot reuse the group's number, so no other process gets the signal.
    Descendants that leave the group escape.

    Yields:
      The object that starts them.
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
                process.kill()  # it may have left the group; Popen never signals a reaped one
                process.wait()
