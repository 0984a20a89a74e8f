"""Ranks that are measured together: in this process, in others, or in a launched job."""

from __future__ import annotations

import abc
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll._cluster.launch.subprocesses import signal_name, surely_ended
from jaxcoll._errors import LaunchError
from jaxcoll.bench.counters import loopback_bytes
from jaxcoll.bench.ranks.rank import Rank

Entry = tuple[str, ...]
"""Names of contestants, of which the fastest takes part."""


class Team(abc.ABC):
    """Ranks of one library that carry out the same requests at the same time."""

    on_this_host = False  # whether all ranks are known to run on this machine
    launched = False  # whether they are processes of their own
    barrier_bytes = 0.0  # that the barrier before a round sends
    network = ""  # what joins their hosts, in words; "": it is one host, or that is not known

    def __init__(self, entries: Sequence[Entry], world: dict[str, Any]) -> None:
        self.entries = tuple(entries)
        self.world = world  # as its first rank describes it; see `Rank.world`

    def sent_bytes(self) -> int | None:
        """Bytes that the kernel has counted of what ranks exchange; None: it does not."""
        return None

    @abc.abstractmethod
    def do(self, method: str, **arguments: Any) -> list[Any]:
        """Have each rank carry out a method of `Rank`; returns the replies in rank order."""


class Here(Team):
    """A rank in this process, which has all the devices; `together`: other ranks do the same.

    In a job that somebody else has launched, every process runs the whole benchmark, and replies
    are gathered so that all processes take the same decisions.
    """

    def __init__(self, entries: Sequence[Entry], rank: Rank, *, together: bool) -> None:
        super().__init__(entries, rank.world())
        self._rank, self._together = rank, together
        self.on_this_host = not together

    def do(self, method: str, **arguments: Any) -> list[Any]:
        """See `Team`."""
        reply = getattr(self._rank, method)(**arguments)
        return _gathered(reply) if self._together else [reply]


def _gathered(reply: Any) -> list[Any]:
    """The replies of all processes of this JAX world."""
    from jax.experimental.multihost_utils import process_allgather

    # It gathers arrays of one shape only, so the lengths go first.
    mine = np.frombuffer(json.dumps(reply).encode(), np.uint8)
    lengths = np.asarray(process_allgather(np.array([mine.size]))).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: mine.size] = mine
    rows = np.asarray(process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]


class Launched(Team):
    """Ranks in processes of their own on this host, which `serve` requests over pipes."""

    on_this_host = launched = True

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
        self._pipes, self.sent_bytes = pipes, loopback_bytes
        world = self._replies("start")[0]
        # Ranks of other libraries name their contestants themselves.
        super().__init__(entries or [tuple(entry) for entry in world.get("entries", ())], world)

    def do(self, method: str, **arguments: Any) -> list[Any]:
        """See `Team`."""
        for requests, _ in self._pipes:
            # That a rank has ended is found out when its reply is read.
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
        """Blame the rank that ended first: where one is killed, the others' calls fail as well."""
        # The error that a rank reports explains more than its exit status.
        others = [r for r in range(len(self._running)) if r != rank or not error]
        patience = time.monotonic() + 1
        # Several may fail at once, and the one that was killed is seen a moment later.
        while not (dead := [r for r in others if self._running[r].poll() is not None]):
            if time.monotonic() > patience:
                break
            time.sleep(0.02)
        rank = dead[0] if dead else rank
        who = f"{self._label}: process {rank} of {len(self._running)}"
        if not dead:
            raise LaunchError(f"{who} failed ({doing}): {error or 'it closed its pipe'}")
        status = self._running[rank].returncode
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended ({status})"
        lines = self._logs[rank].read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        words = f" Its last words: {last[:300]}" if last else ""
        raise LaunchError(f"{who} {how} ({doing}).{words}")


@contextlib.contextmanager
def launched(
    label: str,
    entries: Sequence[Entry],
    command: Sequence[str],
    worlds: Sequence[dict[str, str]],
    timeout: float,
    before: Sequence[Sequence[str]] | None = None,  # what each one's command begins with
) -> Iterator[Launched]:
    """Start a team of processes that run `command`, one for each of `worlds`; none outlives it."""
    with (
        tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder,
        surely_ended() as running,
        contextlib.ExitStack() as open_pipes,
    ):
        logs, pipes = [], []
        for rank, variables in enumerate(worlds):
            logs.append(Path(folder) / f"{rank}.log")
            standard_input, requests = Pipe(duplex=False)
            replies, standard_output = Pipe(duplex=False)
            pipes.append((open_pipes.enter_context(requests), open_pipes.enter_context(replies)))
            with logs[-1].open("wb") as log, standard_input, standard_output:
                streams = {"stdin": standard_input, "stdout": standard_output, "stderr": log}
                running.start([*(before[rank] if before else ()), *command], variables, **streams)
        yield Launched(label, entries, running.processes, pipes, logs, timeout)
