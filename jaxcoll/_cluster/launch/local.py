"""The world of several processes on this host: its coordinator, and what each process is given."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import jax

from jaxcoll._cluster.coordinator import Coordinator, start_coordinator
from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launchers import COORDINATOR, PROCESSES, RANK


def join() -> bool:
    """Enter the `world` that started this process, before any JAX work; whether one did."""
    if RANK not in os.environ:
        return False
    jax.config.update("jax_platforms", "cpu")
    initialize()
    return True


@contextlib.contextmanager
def world(processes: int, platform: str = "", count: int = 0) -> Iterator[list[dict[str, str]]]:
    """A coordinator on this host; yields each rank's environment variables, with which it joins."""
    with coordinated(processes) as coordinator:
        yield world_variables(coordinator.address, processes, platform, count)


def world_variables(
    address: str, processes: int, platform: str = "", count: int = 0
) -> list[dict[str, str]]:
    """Each rank's environment variables, by which it finds the coordinator at an address.

    With a platform also those by which it has so many devices of it.
    """
    common = {COORDINATOR: address, PROCESSES: str(processes)}
    return [
        {**common, RANK: str(rank), **_device_variables(platform, count, rank)}
        for rank in range(processes)
    ]


def _device_variables(platform: str, count: int, rank: int) -> dict[str, str]:
    """Variables for the devices of a process, and defaults that the user's own replace."""
    if not platform:
        return {}
    # JAX's preemption service would keep SIGTERM from ending a process.
    usual = {"PYTHONUNBUFFERED": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    if platform == "cpu":
        own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    else:
        ids = ",".join(str(rank * count + k) for k in range(count))
        own = {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": ids}
        # NCCL's processes on one host need no other interface to find each other.
        usual["NCCL_SOCKET_IFNAME"] = "lo"
    return {**{name: os.environ.get(name, value) for name, value in usual.items()}, **own}


@contextlib.contextmanager
def coordinated(processes: int, log: Any = subprocess.DEVNULL) -> Iterator[Coordinator]:
    """A coordinator that listens on the loopback interface only, and is ended afterwards."""
    coordinator = start_coordinator("127.0.0.1:0", processes, log=log)
    try:
        yield coordinator
    finally:
        coordinator.end()


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
