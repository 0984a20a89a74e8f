"""Start processes that certainly end, however the one that started them ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxcoll._cluster.launchers import OF_A_LAUNCH, check_system

# Reads process groups, one per line, until the writer is gone.
_WATCH = 'while read -r group; do set -- "$@" "-$group"; done; kill -s KILL -- "$@" 2>/dev/null'


def signal_name(number: int) -> str:
    """A signal by its name; real-time signals are counted from the first of them.

    Examples:
      >>> signal_name(9), signal_name(signal.SIGRTMIN + 3)
      ('SIGKILL', 'SIGRTMIN+3')
    """
    first = getattr(signal, "SIGRTMIN", None)  # macOS has no real-time signals
    if first is not None and first < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - first}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Running:
    """Processes that lead sessions of their own, in the order in which they were started."""

    def __init__(self, watch: subprocess.Popen[bytes]) -> None:
        self._watch = watch
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start one more; `env` is added to the environment, `streams` are `Popen`'s."""
        # This process may itself belong to a job, which its children must not enter.
        own = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
        process: subprocess.Popen[Any] = subprocess.Popen(
            command, env={**own, **env}, start_new_session=True, **streams
        )
        self.add(process)
        return process

    def add(self, process: Any) -> None:
        """Have a process that leads a session end with the others."""
        self.processes.append(process)
        assert self._watch.stdin is not None
        self._watch.stdin.write(b"%d\n" % process.pid)
        self._watch.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to every process that has not ended, and to those that it started."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


@contextlib.contextmanager
def surely_ended() -> Iterator[Running]:
    """Start processes in here: at the end all are killed, with those that they started."""
    # If this process is killed first, a shell of a few hundred kilobytes does it: it holds the
    # other end of a pipe, which the system closes. Processes that left their session escape.
    check_system()
    watch = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "jaxcoll-watch"], stdin=subprocess.PIPE, start_new_session=True
    )
    running = Running(watch)
    try:
        yield running
    finally:
        for process in running.processes:
            # Also if the process itself has ended: those that it started may not have.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in running.processes:
            process.wait()
        watch.kill()
        watch.wait()
        assert watch.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            watch.stdin.close()
