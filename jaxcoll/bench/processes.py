"""Processes of this host that are surely ended, however the one that started them ends."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Reads the numbers of process groups, a line each, until whoever writes them is gone.
_WATCH = 'while read -r group; do set -- "$@" "-$group"; done; kill -s KILL -- "$@" 2>/dev/null'


class Running:
    """Processes that lead sessions of their own.

    Attributes:
      processes: in the order in which they were started.
    """

    def __init__(self, watch: subprocess.Popen[bytes]) -> None:
        self._watch = watch
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start one more; `env` is added to the environment, `streams` are `Popen`'s."""
        whole = {**os.environ, **env}
        process: subprocess.Popen[Any] = subprocess.Popen(
            command, env=whole, start_new_session=True, **streams
        )
        assert self._watch.stdin is not None
        self._watch.stdin.write(b"%d\n" % process.pid)
        self._watch.stdin.flush()
        self.processes.append(process)
        return process

    def signal(self, number: int) -> None:
        """Send a signal to every process that has not ended, and to those that it started."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


@contextlib.contextmanager
def surely_ended() -> Iterator[Running]:
    """Processes that are all killed at the end, with those that they started.

    Where this process is killed first, a watch of a few hundred kilobytes does it: it holds the
    other end of a pipe, which the system closes. What has left its session is out of reach.

    Yields:
      What starts them.
    """
    watch = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "jaxcoll-watch"], stdin=subprocess.PIPE, start_new_session=True
    )
    running = Running(watch)
    try:
        yield running
    finally:
        for process in running.processes:
            # Also where the process itself has ended: those that it started may not have.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in running.processes:
            process.wait()
        watch.kill()
        watch.wait()
        assert watch.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            watch.stdin.close()


class Lines:
    """What processes print, line by line, as it comes.

    Args:
      say: told the rank, the stream ("out" or "err") and a whole line with its end.
    """

    def __init__(self, say: Callable[[int, str, bytes], None]) -> None:
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[int, bytes] = {}

    def of(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Listen to a process that has pipes."""
        for stream, pipe in (("out", process.stdout), ("err", process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (rank, stream))

    def pass_on(self, seconds: float) -> None:
        """Pass on what comes within some time, and return as soon as something has."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            self._read(key)

    def finish(self) -> None:
        """Pass on what is left, unfinished lines too; nobody is waited for."""
        while ready := self._selector.select(0):
            for key, _ in ready:
                self._read(key)
        for key in list(self._selector.get_map().values()):
            self._end(key)
        self._selector.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        chunk = os.read(key.fd, 1 << 16)
        if not chunk:
            return self._end(key)
        *whole, rest = (self._unfinished.get(key.fd, b"") + chunk).split(b"\n")
        self._unfinished[key.fd] = rest
        rank, stream = key.data
        for line in whole:
            self._say(rank, stream, line + b"\n")
        return None

    def _end(self, key: selectors.SelectorKey) -> None:
        if rest := self._unfinished.pop(key.fd, b""):
            rank, stream = key.data
            self._say(rank, stream, rest + b"\n")
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
