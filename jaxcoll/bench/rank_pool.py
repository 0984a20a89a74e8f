"""A team of ranks that are measured together: in this process, in others, or in a launched job."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll._cluster.launch.local import LaunchError
from jaxcoll._cluster.launch.subprocesses import signal_name, surely_ended
from jaxcoll.bench.ranks.rank import Rank

Entry = tuple[str, ...]
"""Names of contestants, of which the fastest takes part."""


class Team(abc.ABC):
    """Ranks of one library that are told the same at the same time.

    Attributes:
      entries: what it is to be measured with.
      world: what its first rank says about it; see `Rank.world`.
      on_this_host: whether all ranks are known to run on this machine.
      on_loopback: whether what they exchange goes through its loopback interface.
    """

    on_this_host = False
    on_loopback = False

    def __init__(self, entries: Sequence[Entry], world: dict[str, Any]) -> None:
        self.entries = tuple(entries)
        self.world = world

    @abc.abstractmethod
    def do(self, what: str, **arguments: Any) -> list[Any]:
        """Have each rank carry out a method of `Rank`; returns the answers in rank order."""


class Here(Team):
    """A rank in this process, which has all the devices; `together`: other ranks do the same.

    In a job that somebody else has launched, every process runs the whole benchmark, and its
    answers are gathered so that all of them take the same decisions.
    """

    def __init__(self, entries: Sequence[Entry], rank: Rank, *, together: bool) -> None:
        super().__init__(entries, rank.world())
        self._rank, self._together = rank, together
        self.on_this_host = not together

    def do(self, what: str, **arguments: Any) -> list[Any]:
        """See `Team`."""
        answer = getattr(self._rank, what)(**arguments)
        return _gathered(answer) if self._together else [answer]


def _gathered(answer: Any) -> list[Any]:
    """The answers of all processes of this JAX world."""
    from jax.experimental.multihost_utils import process_allgather

    mine = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    lengths = np.asarray(process_allgather(np.array([mine.size]))).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: mine.size] = mine
    rows = np.asarray(process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]


class Launched(Team):
    """Ranks in processes of their own on this host, each of which serves at the end of a pipe."""

    on_this_host = on_loopback = True

    def __init__(
        self,
        label: str,
        entries: Sequence[Entry],
        running: list[subprocess.Popen[bytes]],
        logs: list[Path],
        timeout: float,
    ) -> None:
        self._label, self._running, self._logs, self._timeout = label, running, logs, timeout
        self._unread = [b""] * len(running)
        super().__init__(entries, self._answers("start")[0])

    def do(self, what: str, **arguments: Any) -> list[Any]:
        """See `Team`.

        Raises:
          LaunchError: a rank raised an exception, ended, or took longer than the time limit.
        """
        line = json.dumps([what, arguments]).encode() + b"\n"
        doing = f"{what} {arguments['name']!r}" if "name" in arguments else what
        for process in self._running:
            assert process.stdin is not None
            # A rank that has ended is found out when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        return self._answers(doing)

    def _answers(self, doing: str) -> list[Any]:
        """One answer of each rank."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as pipes:
            for rank, process in enumerate(self._running):
                assert process.stdout is not None
                pipes.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self._running):
                ready = pipes.select(deadline - time.monotonic())
                if not ready:
                    late = [r for r in range(len(self._running)) if r not in found]
                    raise LaunchError(
                        f"{self._label}: {doing} took longer than {self._timeout:g} s on "
                        f"process{'es' * (len(late) > 1)} {', '.join(map(str, late))} of "
                        f"{len(self._running)}; --timeout allows for more."
                    )
                for key, _ in ready:
                    answer = self._read(key.data, key.fd, doing)
                    if answer is not None:
                        found[key.data] = answer["value"]
                        pipes.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self._running))]

    def _read(self, rank: int, pipe: int, doing: str) -> dict[str, Any] | None:
        """A rank's answer, or None while it is incomplete."""
        chunk = os.read(pipe, 1 << 16)
        line, newline, rest = (self._unread[rank] + chunk).partition(b"\n")
        if not newline:
            self._unread[rank] = line
            if not chunk:
                self._lost(rank, doing)
            return None
        self._unread[rank] = rest
        answer = json.loads(line)
        if "error" in answer:
            self._lost(rank, doing, answer["error"])
        return answer

    def _lost(self, rank: int, doing: str, error: str = "") -> None:
        """Blame the rank that ended first: where one is killed, the others' calls fail as well."""
        # What a rank says of itself tells more than how it then ends.
        others = [r for r in range(len(self._running)) if r != rank or not error]
        patience = time.monotonic() + 1
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
        raise LaunchError(f"{who} {how} ({doing}).{_last_words(self._logs[rank])}")


@contextlib.contextmanager
def launched(
    label: str,
    entries: Sequence[Entry],
    command: Sequence[str],
    worlds: Sequence[dict[str, str]],
    timeout: float,
) -> Iterator[Launched]:
    """Start a team of processes; none is left at the end.

    Args:
      label: the library's name, for messages.
      entries: what it is to be measured with.
      command: what each process runs: something that calls `serve`.
      worlds: each rank's own environment variables.
      timeout: seconds that one answer may take.

    Yields:
      The team, whose ranks have met.

    Raises:
      LaunchError: they did not meet.
    """
    with tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder, surely_ended() as running:
        logs = [Path(folder) / f"{rank}.log" for rank in range(len(worlds))]
        for log, variables in zip(logs, worlds, strict=True):
            with log.open("wb") as out:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                running.start(command, variables, stderr=out, **pipes)
        try:
            yield Launched(label, entries, running.processes, logs, timeout)
        finally:
            for process in running.processes:
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    return f" Its last words: {said[-1][:300]}" if said else ""
