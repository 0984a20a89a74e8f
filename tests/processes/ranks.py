"""Copies of a command that form one world on this host, run to their end; what each printed."""

import tempfile
import time
from pathlib import Path

import forks

from jaxcoll._job.launch.supervisor import world


def launch(command, processes, *, timeout, env=None, ends=None):
    """Run copies of `python …`, each of which calls `join`, and none of which outlives this call.

    It waits for those that are to end well: for all, or for the ranks in `ends`.

    Returns:
      What each printed: of both streams together.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        world(processes) as (variables, _),
        forks.running() as running,
    ):
        logs = [Path(folder) / f"{rank}.log" for rank in range(processes)]
        for log, own in zip(logs, variables, strict=True):
            with log.open("wb") as out:
                running.start(command, {"JAX_PLATFORMS": "cpu", **(env or {}), **own}, stdout=out)
        waited_for = [running.processes[rank] for rank in ends or range(processes)]
        until = time.monotonic() + timeout
        statuses = [None]
        while None in statuses and not any(statuses) and time.monotonic() < until:
            time.sleep(0.02)
            statuses = [process.poll() for process in waited_for]
        texts = [log.read_text("utf8", "replace") for log in logs]
    each = [f"process {r} printed:\n{text[-3000:]}" for r, text in enumerate(texts)]
    assert set(statuses) == {0}, "\n".join([f"they ended with {statuses}", *each])
    return texts
