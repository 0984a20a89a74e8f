"""Hosts of a job's processes. All processes get the same answer to who shares a host.

Two processes share a host if they can connect on its loopback interface: they have the same host
name, boot of the kernel and network namespace. Each process publishes these once, as a key of the
coordination service. `initialize` does so before there are devices, so that nobody waits later.
After `jax.distributed.initialize` the first use waits up to `HOSTS_SECONDS` for all others.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from jaxcoll._compat.coordination import Store, store
from jaxcoll._job.exchange import LateError, agree, exchange
from jaxcoll._job.timing import HOSTS_SECONDS

HOST = "JAXCOLL_HOST"
"""The environment variable that overrides what a process would take for the name of its host."""

_PUBLISHED, _AGREED = "jaxcoll/hosts", "jaxcoll/hosts_agreed"
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")

_lock = threading.Lock()
_known: tuple[Store, tuple[int, ...]] | None = None


def publish_host() -> str:
    """Tell the other processes of the job which host this one is on, and return it."""
    if (keys := store()) is None:
        return _place()
    # A restarted process, perhaps on another host, keeps the value that others have read.
    return agree(keys, f"{_PUBLISHED}/{keys.process}", _place())


def hosts_of_job() -> tuple[int, ...]:
    """Number the hosts: for each process of this job, the first process on its host.

    The result is the same in all processes and never changes. If some have not published their
    host within `HOSTS_SECONDS`, all processes assume that they share one host.
    """
    global _known
    with _lock:
        keys = store()
        if keys is not None and keys.processes > 1:
            if _known is None or not _known[0].shares_client(keys):
                places = _agree_on_places(keys)
                hosts = tuple(map(places.index, places)) or (0,) * keys.processes
                _known = keys, hosts
        elif _known is None:
            return (0,)
        # Even if the coordinator has died since, the agreement still holds.
        return _known[1]


def _agree_on_places(keys: Store) -> list[str]:
    """Get what all processes published; [] if the first to ask gave up waiting for some."""
    if keys.try_get(_AGREED) is not None:
        return agree(keys, _AGREED, [])
    try:
        places = exchange(keys, _PUBLISHED, publish_host(), range(keys.processes), HOSTS_SECONDS)
    except LateError:
        places = {}
    return agree(keys, _AGREED, list(places.values()))


def _place() -> str:
    if given := os.environ.get(HOST):
        return given
    name = kernel = socket.gethostname()
    network = ""
    try:
        kernel, network = _BOOT.read_text().strip(), os.readlink(_NETWORK)
    except OSError:
        pass  # not Linux: use the name alone
    return f"{name} {kernel} {network}"
