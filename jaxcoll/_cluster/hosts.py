"""Which processes of a job share a host, the same to all of them.

Two processes share a host where they can meet on its loopback interface: one name, one start of one
kernel, one network namespace. Each process publishes that once, in the coordination service's keys.
`initialize` does so before there are devices, so that later nobody waits. Where
`jax.distributed.initialize` was called instead, the first use waits for all others, for a while.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from jaxcoll._cluster.timing import HOSTS_SECONDS
from jaxcoll._compat.coordination import Store, store

HOST = "JAXCOLL_HOST"
"""The variable by which a process is given the name of its host, in place of what it would find."""

_PUBLISHED, _AGREED = "jaxcoll/hosts", "jaxcoll/hosts_agreed"
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_POLL_SECONDS = 0.02
_USUAL_CORES = 2

_lock = threading.Lock()
_known: tuple[Store, Hosts] | None = None


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a job."""

    # For each process the number of the first process on its host
    of_processes: tuple[int, ...] = (0,)
    cores: int = _USUAL_CORES  # that the processes of a host share, on the host with the fewest
    # Whether all processes have published where they are. If not, one host is assumed
    known: bool = False

    @property
    def are_one(self) -> bool:
        """Whether all processes are known to be on one host."""
        return self.known and len(set(self.of_processes)) == 1


class _Place(NamedTuple):
    """Where a process is: on which host, under which kernel, with how many cores."""

    host: str
    kernel: str
    cores: int


def publish_host() -> None:
    """Let the other processes of the job know on which host this one is."""
    if keys := store():
        # A process that was started again, perhaps elsewhere, keeps what the others have read.
        keys.agree(f"{_PUBLISHED}/{keys.process}", json.dumps(_place()))


def hosts_of_job() -> Hosts:
    """The hosts of this job.

    Law: it is the same in all processes, and stays so. Where not all processes have published
    theirs within `HOSTS_SECONDS`, all assume that they share one.
    """
    global _known
    with _lock:
        keys = store()
        if keys is not None and keys.processes > 1:
            if _known is None or not _known[0].is_of(keys):
                _known = keys, _hosts(_agreed(keys), keys.processes)
        elif _known is None:
            return Hosts((0,), os.cpu_count() or 1, known=True)
        # Without the coordinator, which may have died, what was agreed still holds.
        return _known[1]


def _agreed(keys: Store) -> list[str]:
    """What processes have published; () if the first to look for it gave up."""
    decided = keys.try_get(_AGREED)
    if decided is None:
        publish_host()
        until = time.monotonic() + HOSTS_SECONDS
        while len(found := keys.all(_PUBLISHED)) < keys.processes and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        known = len(found) == keys.processes
        places = [found[str(process)] for process in range(keys.processes)] if known else []
        decided = keys.agree(_AGREED, json.dumps(places))
    return json.loads(decided)


def _hosts(published: list[str], processes: int) -> Hosts:
    if not published:
        return Hosts((0,) * processes)
    places = [_Place(*json.loads(text)) for text in published]
    hosts = [place.host for place in places]
    # Containers that share a machine share its cores.
    sharing = Counter(kernel for _, kernel in {place[:2] for place in places})
    cores = min(max(1, place.cores // sharing[place.kernel]) for place in places)
    return Hosts(tuple(map(hosts.index, hosts)), cores, known=True)


def _place() -> _Place:
    name = kernel = socket.gethostname()
    network = ""
    try:
        kernel, network = _BOOT.read_text().strip(), os.readlink(_NETWORK)
    except OSError:
        pass  # not Linux: the name has to do
    host = os.environ.get(HOST) or f"{name} {kernel} {network}"
    return _Place(host, kernel, os.cpu_count() or 1)
