"""Workers as groups of devices."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax

from jaxcoll._distribute.values.device_names import device_named
from jaxcoll._mesh.mesh import checked_devices


def workers_of(
    worker_devices: Any, num_gpus_per_worker: Any, caller: str
) -> tuple[tuple[jax.Device, ...], ...]:
    """The devices of each worker.

    Args:
      worker_devices: one name a worker, which take `jax.devices()` in their order, so many a
        worker; or one sequence of devices or device strings a worker.
      num_gpus_per_worker: devices a worker has; 0: one, as a worker without GPUs.
      caller: what is named in a message.

    Returns:
      As many devices for each worker, none of them twice.

    Raises:
      ValueError: there is no worker; one is named twice, or has another number of devices; or
        there are not enough devices.
    """
    count = _count(num_gpus_per_worker) or 1
    workers = worker_devices
    if not isinstance(workers, list | tuple) or not workers:
        raise ValueError(
            f"`{caller}` expects `worker_devices` to be a list with one name, or one list of "
            f"devices, for each worker; got {workers!r}."
        )
    if all(isinstance(worker, str) and worker for worker in workers):
        return _named(workers, count, caller)
    if not all(isinstance(worker, list | tuple) for worker in workers):
        raise ValueError(
            f"`{caller}` expects `worker_devices` to hold names, or lists of devices, and one kind "
            f"of them only; got {workers!r}."
        )
    groups = [
        tuple(device_named(d, caller) if isinstance(d, str) else d for d in worker)
        for worker in workers
    ]
    checked_devices([device for group in groups for device in group], caller)
    for i, group in enumerate(groups):
        if len(group) != count:
            raise ValueError(
                f"`{caller}` expects every worker to have `num_gpus_per_worker` devices, which is "
                f"{num_gpus_per_worker}; worker {i} has {len(group)}."
            )
    return tuple(groups)


def _named(names: Sequence[str], count: int, caller: str) -> tuple[tuple[jax.Device, ...], ...]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`{caller}` got a worker twice: {', '.join(twice)}.")
    devices = jax.devices()
    if len(names) * count > len(devices):
        raise ValueError(
            f"`{caller}` needs {len(names) * count} devices for {len(names)} workers of {count} "
            f"each; there are {len(devices)}: {', '.join(map(str, devices))}. Simulated ones are "
            'made by `jax.config.update("jax_num_cpu_devices", n)` at the start of a program.'
        )
    return tuple(
        tuple(devices[worker * count : (worker + 1) * count]) for worker in range(len(names))
    )


def _count(value: Any) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or int(value) < 0:
        raise ValueError(
            "`num_gpus_per_worker` must be a non-negative integer (0: workers without GPUs, of "
            f"one device each); got {value!r}."
        )
    return int(value)
