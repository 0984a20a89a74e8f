"""Hosts of a job's processes, the same to all of them.

Two processes share a host where they can meet on its loopback interface: one name, one start of one
kernel, one network namespace. Each process publishes that once, in the coordination service's keys.
`initialize` does so before there are devices, so that later nobody waits. Where
`jax.distributed.initialize` was called instead, the first use waits for all others, for a while.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

from jaxcoll._cluster.timing import HOSTS_SECONDS
from jaxcoll._compat.coordination import Store, store

HOST = "JAXCOLL_HOST"
"""The variable by which a process is given the name of its host, in place of what it would find."""

_PUBLISHED, _AGREED = "jaxcoll/hosts", "jaxcoll/hosts_agreed"
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_POLL_SECONDS = 0.02

_lock = threading.Lock()
_known: tuple[Store, tuple[int, ...]] | None = None


def publish_host() -> None:
    """Let the other processes of the job know on which host this one is."""
    if keys := store():
        # A process that was started again, perhaps elsewhere, keeps what the others have read.
        keys.agree(f"{_PUBLISHED}/{keys.process}", _place())


def hosts_of_job() -> tuple[int, ...]:
    """Return for each process of this job the number of the first process on its host.

    It is the same in all processes, and stays so. Where not all processes have published theirs
    within `HOSTS_SECONDS`, all assume that they share one host.
    """
    global _known
    with _lock:
        keys = store()
        if keys is not None and keys.processes > 1:
            if _known is None or not _known[0].is_of(keys):
                places = _agreed(keys)
                hosts = tuple(map(places.index, places)) or (0,) * keys.processes
                _known = keys, hosts
        elif _known is None:
            return (0,)
        # Without the coordinator, which may have died, what was agreed still holds.
        return _known[1]


def _agreed(keys: Store) -> list[str]:
    """Return what processes have published; () if the first to look for it gave up."""
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


def _place() -> str:
    """Return the name of the host that this process is on."""
    if given := os.environ.get(HOST):
        return given
    name = kernel = socket.gethostname()
    network = ""
    try:
        kernel, network = _BOOT.read_text().strip(), os.readlink(_NETWORK)
    except OSError:
        pass  # not Linux: the name has to do
    return f"{name} {kernel} {network}"
