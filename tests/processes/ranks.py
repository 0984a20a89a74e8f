"""Copies of a command that form one world on this host, run to their end; what each printed."""

import dataclasses

from jaxcoll._cluster.launch.local import world
from jaxcoll._cluster.launch.supervisor import Job, Owner
from jaxcoll._errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one rank ended: its log has both streams together."""

    rank: int
    status: int
    log: str


class _Logs(Owner):
    def __init__(self, processes):
        self._logs = [bytearray() for _ in range(processes)]

    def show(self, rank, stream, piece):
        self._logs[rank] += piece

    def texts(self):
        return [log.decode(errors="replace") for log in self._logs]


def launch(command, processes, *, timeout, env=None):
    """Run copies of `command`, each of which calls `join`; none outlives this call."""
    logs = _Logs(processes)
    with world(processes) as variables:
        job = Job(command, [{**(env or {}), **each} for each in variables], logs)
        outcome = job.run(timeout, grace=0)
    texts = logs.texts()
    if outcome.failed:
        first = outcome.failed[0]
        raise LaunchError(
            f"process {first} of {processes} ended with status {outcome.statuses[first]}:\n"
            + _tail(texts[first])
        )
    if outcome.late:
        late = [rank for rank, status in enumerate(outcome.statuses) if status is None]
        raise LaunchError(
            f"processes {late} of {processes} did not end within {timeout:g} s:\n"
            + _tail(texts[late[0]])
        )
    return [Ended(rank, 0, text) for rank, text in enumerate(texts)]


def _tail(log, lines=30):
    return "\n".join(log.splitlines()[-lines:])
