"""Copies of a command that form one world on this host, run to their end; what each printed."""

import socket
import tempfile
import time
from pathlib import Path

import forks

from jaxcoll._cluster.launch.local import world


def launch(command, processes, *, timeout, env=None):
    """Run copies of `python …`, each of which calls `join`, and none of which outlives this call.

    Returns:
      What each printed: of both streams together.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        world(processes) as variables,
        forks.running() as running,
    ):
        logs = [Path(folder) / f"{rank}.log" for rank in range(processes)]
        for log, own in zip(logs, variables, strict=True):
            with log.open("wb") as out:
                running.start(command, {**(env or {}), **own}, stdout=out)
        until = time.monotonic() + timeout
        statuses = [None]
        while None in statuses and not any(statuses) and time.monotonic() < until:
            time.sleep(0.02)
            statuses = [process.poll() for process in running.processes]
        texts = [log.read_text("utf8", "replace") for log in logs]
    each = [
        f"process {r} ended with {s}:\n{t[-3000:]}"
        for r, (s, t) in enumerate(zip(statuses, texts, strict=True))
    ]
    assert set(statuses) == {0}, "\n".join(each)
    return texts


def free_port():
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
