"""The world of several processes on this host: its coordinator, and what each process is given."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxcoll._cluster.coordinator import start_coordinator
from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.subprocesses import COORDINATOR, PROCESSES, RANK


def join() -> bool:
    """Enter the `world` that started this process, if one did, before any JAX work."""
    if RANK not in os.environ:
        return False
    jax.config.update("jax_platforms", "cpu")
    initialize()
    return True


@contextlib.contextmanager
def world(
    processes: int, platform: str = "", count: int = 0, log: Any = subprocess.DEVNULL
) -> Iterator[tuple[list[dict[str, str]], Callable[[], bool]]]:
    """Run a coordinator on the loopback interface.

    Yields:
      Each rank's environment variables, and a function that is True once a process has joined.
    """
    with contextlib.closing(start_coordinator("127.0.0.1:0", processes, log=log)) as coordinator:
        variables = world_variables(coordinator.address, processes, platform, count)
        yield variables, coordinator.is_met


def world_variables(
    address: str, processes: int, platform: str = "", count: int = 0
) -> list[dict[str, str]]:
    """Return each rank's environment variables, by which it finds the coordinator at an address.

    With a platform also those by which it has `count` devices of it.
    """
    common = {COORDINATOR: address, PROCESSES: str(processes)}
    return [
        {**common, RANK: str(rank), **_device_variables(platform, count, rank)}
        for rank in range(processes)
    ]


def _device_variables(platform: str, count: int, rank: int) -> dict[str, str]:
    if not platform:
        return {}
    # JAX's preemption service would keep SIGTERM from ending a process.
    defaults = {"PYTHONUNBUFFERED": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    if platform == "cpu":
        own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    else:
        ids = ",".join(str(rank * count + k) for k in range(count))
        own = {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": ids}
        # NCCL's processes on one host need no other interface to find each other.
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    return {**{name: os.environ.get(name, value) for name, value in defaults.items()}, **own}
