"""`MultiWorkerAllReduce`: an algorithm for each size, within workers and between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxcoll._distribute.all_reduce_ops import AllReduceCrossDeviceOps, Route, grid_of
from jaxcoll._distribute.arguments import devices_named
from jaxcoll._plan import checks
from jaxcoll._plan.algorithms import canonical, check_fits
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._plan.packs.packing import PackingRule
from jaxcoll._plan.world import World


class MultiWorkerAllReduce(AllReduceCrossDeviceOps):
    """All-reduces over workers with several devices each, by an algorithm for each size.

    It is an `AllReduceCrossDeviceOps` for the workers' devices only. Each array takes the first
    tuple of the specification whose limit it does not exceed.

    Algorithms, in TensorFlow's names: "nccl", "xring", "pscpu", "psgpu" run over all devices;
    "nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu" reduce-scatter within each worker,
    all-reduce each shard between the workers, and all-gather within. nccl is the backend's own,
    xring a ring, rechd halving and doubling, pscpu and psgpu a shuffle in which each shard is
    summed by an owner. Any two of them may be put together by "/", for any number of workers
    and devices.

    Args:
      worker_devices: one device string for each worker, such as "/job:worker/task:0": the workers
        take `jax.devices()` in their order, `num_gpus_per_worker` each, whatever they are called,
        so that simulated CPU devices stand for workers too. Or one list of devices, or of device
        strings, for each worker.
      num_gpus_per_worker: devices of each worker; 0: one, as of a worker without GPUs.
      all_reduce_spec: an algorithm's name; a tuple (name, shards, limit) of which shards (1) and
        limit (-1) may be left out; or a list of such tuples. Each array, after packing, is cut
        in `shards` parts, which are reduced side by side; of a shuffle (of "…/pscpu": the one
        between workers) it is the number of owners, at most as many as replicas it runs over.
        `limit` is a size in bytes, inclusive, increasing from tuple to tuple, and -1, for any
        size, in the last.
      num_packs: as in `AllReduceCrossDeviceOps`, for the arrays of each tuple by themselves.
      agg_small_grads_max_bytes: likewise.
      agg_small_grads_max_group: likewise.

    Raises:
      ValueError: an argument is invalid; there are not enough devices, or too
        many shards. On a call: a value over other devices than the workers'.

    Examples:
      >>> workers = ["/job:worker/task:0", "/job:worker/task:1"]
      >>> spec = [("nccl", 1, 1024), ("nccl/rechd", 2, -1)]
      >>> ops = MultiWorkerAllReduce(workers, num_gpus_per_worker=4, all_reduce_spec=spec)
      >>> value = PerReplica.from_function(float)
      >>> ops.reduce("sum", value, value)[7].tolist()
      28.0
    """

    def __init__(
        self,
        worker_devices: Sequence[str] | Sequence[Sequence[jax.Device | str]],
        num_gpus_per_worker: int,
        all_reduce_spec: str | tuple[Any, ...] | list[tuple[Any, ...]] = ("pscpu/pscpu", 2, -1),
        num_packs: int = 0,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        super().__init__("nccl", num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)
        name = type(self).__name__
        workers = _workers_of(worker_devices, num_gpus_per_worker, name)
        self._group = tuple(device for worker in workers for device in worker)
        self._mesh = grid_of(self._group, len(workers))
        self._routes = routes_of(
            all_reduce_spec, self._packing, World(sizes=self._mesh.devices.shape)
        )
        del self._arguments["all_reduce_alg"]
        self._arguments = {
            "worker_devices": [list(map(str, worker)) for worker in workers],
            "num_gpus_per_worker": int(num_gpus_per_worker),
            "all_reduce_spec": all_reduce_spec,
            **self._arguments,
        }

    def _arranged(self, devices: tuple[jax.Device, ...]) -> tuple[Mesh, tuple[Route, ...]]:
        if set(devices) == set(self._group):
            return self._mesh, self._routes
        return super()._arranged(devices)  # one value of each process: there are no two levels


def _workers_of(
    workers: Any, num_gpus_per_worker: Any, caller: str
) -> tuple[tuple[jax.Device, ...], ...]:
    """Return the devices of each worker: equally many for all, none of them twice."""
    meaning = " (0: workers without GPUs, of one device each)"
    count = checks.count("num_gpus_per_worker", meaning, num_gpus_per_worker) or 1
    expected = "a list with one name, or one list of devices, for each worker"
    if not isinstance(workers, list | tuple) or not workers:
        checks.refuse("worker_devices", expected, workers)
    if all(isinstance(worker, str) and worker for worker in workers):
        twice = sorted({name for name in workers if workers.count(name) > 1})
        if twice:
            raise ValueError(f"`{caller}` got a worker twice: {', '.join(twice)}.")
        every, wanted = jax.devices(), len(workers) * count
        if wanted > len(every):
            raise ValueError(
                f"`{caller}` needs {wanted} devices for {len(workers)} workers of {count} each; "
                f"there are {len(every)}: {', '.join(map(str, every))}. Simulated ones are made by "
                '`jax.config.update("jax_num_cpu_devices", n)` at the start of a program.'
            )
        devices = tuple(every[:wanted])
    elif all(isinstance(worker, list | tuple) for worker in workers):
        devices = devices_named([device for worker in workers for device in worker], caller)
        for i, worker in enumerate(workers):
            if len(worker) != count:
                raise ValueError(
                    f"`{caller}` expects every worker to have `num_gpus_per_worker` devices, which "
                    f"is {num_gpus_per_worker}; worker {i} has {len(worker)}."
                )
    else:
        checks.refuse("worker_devices", expected, workers)
    return tuple(devices[k : k + count] for k in range(0, len(devices), count))


def routes_of(spec: Any, packing: PackingRule | None, world: World) -> tuple[Route, ...]:
    """Return a route for each tuple of a specification in any of its forms.

    Raises:
      ValueError: it has no such form; a tuple does not fit the workers and devices of `world`; the
        limits do not rise, or do not end in -1.
    """
    if isinstance(spec, str):
        spec = (spec,)
    tuples = [spec] if isinstance(spec, tuple) else spec
    if not isinstance(tuples, list) or not tuples or not all(map(_may_be_route, tuples)):
        expected = (
            'a name such as "nccl/xring", a tuple (name, shards, limit in bytes) of which the last '
            "two may be left out, or a list of such tuples"
        )
        checks.refuse("all_reduce_spec", expected, spec)
    routes = []
    for item in tuples:
        name, shards, limit = item[0], *(*item[1:], *(1, -1)[len(item) - 1 :])
        try:
            options = CommunicationOptions(algorithm=name, shards=shards)
            check_fits(canonical(name), options.shards, world)
        except ValueError as error:
            workers, devices = world.sizes
            over = f"{workers} workers of {devices} devices"
            raise ValueError(f"`all_reduce_spec` has {item!r}, for {over}: {error}") from None
        routes.append(Route(options, packing, limit))
    *limits, last = [route.limit for route in routes]
    integers = all(checks.is_integer(limit) and limit >= 0 for limit in limits)
    if last != -1 or not integers or sorted(set(limits)) != limits:
        raise ValueError(
            "the limits of `all_reduce_spec` must be numbers of bytes that increase from tuple to "
            f"tuple, and end in -1, any size; got {[*limits, last]} in {spec!r}."
        )
    return tuple(routes)


def _may_be_route(item: Any) -> bool:
    return isinstance(item, tuple) and 1 <= len(item) <= 3 and isinstance(item[0], str)
