"""Ranks in separate processes that serve requests over pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.counters import loopback_bytes
from jaxcoll.errors import LaunchError

Entry = tuple[str, ...]
"""Names of contestants; only the fastest of them is measured in full."""


class Team:
    """Ranks of one library that handle the same requests at the same time."""

    barrier_bytes = 0.0  # sent by the barrier before a round
    network = ""  # description of the network between the hosts; "" for one host

    def __init__(
        self,
        label: str,
        entries: Sequence[Entry],
        running: Sequence[subprocess.Popen[bytes]],
        pipes: Sequence[tuple[Connection, Connection]],
        logs: Sequence[Path],
        timeout: float,
    ) -> None:
        self._label, self._running, self._logs, self._timeout = label, running, logs, timeout
        self._pipes = pipes
        self.sent_bytes: Callable[[], int | None] = loopback_bytes
        self.world = self._replies("start")[0]  # from the first rank; see `Rank.world`
        # Ranks of other libraries name their contestants themselves.
        self.entries = tuple(map(tuple, entries or self.world.get("entries", ())))

    def do(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of `Rank` on every rank, and return the replies in rank order."""
        for requests, _ in self._pipes:
            # A rank that ended is noticed when its reply is read.
            with contextlib.suppress(BrokenPipeError):
                requests.send((method, arguments))
        return self._replies(f"{method} {arguments['name']!r}" if "name" in arguments else method)

    def _replies(self, doing: str) -> list[Any]:
        values: list[Any] = [None] * len(self._pipes)
        missing = {replies: rank for rank, (_, replies) in enumerate(self._pipes)}
        deadline = time.monotonic() + self._timeout
        while missing:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, sorted(missing.values())))
                raise LaunchError(
                    f"{self._label}: {doing} took longer than {self._timeout:g} s on "
                    f"process{'es' * (len(missing) > 1)} {late} of {len(values)}; --timeout "
                    "allows for more."
                )
            for replies in ready:
                assert isinstance(replies, Connection)
                rank = missing.pop(replies)
                try:
                    values[rank], error = replies.recv()
                except (EOFError, OSError):
                    self._lost(rank, doing)
                else:
                    if error is not None:
                        self._lost(rank, doing, error)
        return values

    def _lost(self, rank: int, doing: str, error: str = "") -> None:
        """Raise an error that names the rank that ended first: its peers' calls fail as well."""
        # A rank's reported error explains more than its exit status.
        others = [r for r in range(len(self._running)) if r != rank or not error]
        # Several ranks may fail at once, and one that closed its pipe is about to end.
        patience = time.monotonic() + (1 if error else 10)
        while not (dead := [r for r in others if self._running[r].poll() is not None]):
            if time.monotonic() > patience:
                break
            time.sleep(0.02)
        rank = dead[0] if dead else rank
        who = f"{self._label}: process {rank} of {len(self._running)}"
        if not dead:
            raise LaunchError(f"{who} failed ({doing}): {error or 'it closed its pipe'}")
        status = self._running[rank].returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended ({status})"
        lines = self._logs[rank].read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        words = f" Last output: {last[:300]}" if last else ""
        raise LaunchError(f"{who} {how} ({doing}).{words}")


@contextlib.contextmanager
def launched(
    label: str,
    entries: Sequence[Entry],
    command: Sequence[str],
    worlds: Sequence[Mapping[str, str]],
    timeout: float,
    before: Sequence[Sequence[str]] | None = None,  # each rank's command prefix
) -> Iterator[Team]:
    """Start a team of processes that run `command`, with the environment variables in `worlds`.

    No rank outlives the block, or this process, however that ends. A request may take `timeout`
    seconds.

    Yields:
      The team, once its ranks are connected.
    """
    with (
        tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, running)
        logs, pipes = [], []
        for rank, variables in enumerate(worlds):
            logs.append(Path(folder) / f"{rank}.log")
            standard_input, requests = Pipe(duplex=False)
            replies, standard_output = Pipe(duplex=False)
            pipes.append((stack.enter_context(requests), stack.enter_context(replies)))
            with logs[-1].open("wb") as log, standard_input, standard_output:
                words = [*(before[rank] if before else ()), *command]
                process = subprocess.Popen(
                    words, env={**os.environ, **variables}, start_new_session=True,
                    stdin=standard_input, stdout=standard_output, stderr=log,
                )  # fmt: skip
            running.append(process)
        yield Team(label, entries, running, pipes, logs, timeout)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.kill()
    for process in running:
        process.wait()
