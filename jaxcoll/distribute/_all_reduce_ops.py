"""Cross-device ops that all-reduce, in one compiled program for all values on the same devices."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxcoll._plan.algorithms import DESCRIPTIONS, TENSORFLOW, canonical
from jaxcoll._plan.checks import count, is_integer, refuse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.packing import UNPACKED, PackingRule
from jaxcoll._plan.world import World
from jaxcoll._runtime.call import Call
from jaxcoll._step.mesh.mesh import make_line
from jaxcoll.distribute._arguments import devices_named
from jaxcoll.distribute._cross_device_ops import Batch, CrossDeviceOps, Reduction
from jaxcoll.distribute._replica_axis import AXIS, drop_deadline, make_program
from jaxcoll.distribute._routes import GroupSmall, NumPacks, Route, parse_routes, reduce_batch

HIERARCHICAL_COPY = "hierarchical_copy"


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """All-reduces in one compiled program, with a given algorithm and packing.

    All values of a batch that share a set of devices are reduced in one program, one dtype per
    pack, and come back in their order. Results are copied to destinations other than a value's own
    devices.

    `num_packs` takes precedence over the grouping of small arrays; without either, nothing is
    packed.

    Args:
      all_reduce_alg: "nccl", the backend's own all-reduce; "hierarchical_copy", as in
        `HierarchicalCopyAllReduce`; or an algorithm of `CommunicationOptions`, such as "ring".
      num_packs: the number of packs, of near-equal bytes, for all values together; at least one
        for each dtype. 0: no such packs.
      agg_small_grads_max_bytes: bytes up to which an array is small: neighbouring small arrays
        of one dtype travel in groups. 0: no grouping.
      agg_small_grads_max_group: the most arrays in a group. 0: no grouping.

    In the options of a call, `bytes_per_pack` replaces the packing, unless it is 0; `algorithm` or
    `implementation` replaces the algorithm; `timeout_seconds` bounds the call.

    Raises:
      ValueError: `all_reduce_alg` names no algorithm; a number is not an integer, or negative.

    Examples:
      >>> small = [PerReplica([float(k), float(k)]) for k in range(3)]
      >>> ops = AllReduceCrossDeviceOps("ring", num_packs=0, agg_small_grads_max_bytes=1024)
      >>> [x[0].tolist() for x in ops.batch_reduce("sum", [(x, x) for x in small])]
      [0.0, 2.0, 4.0]
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        self._algorithm = _algorithm(all_reduce_alg)
        sizes = {
            "num_packs": num_packs,
            "agg_small_grads_max_bytes": agg_small_grads_max_bytes,
            "agg_small_grads_max_group": agg_small_grads_max_group,
        }
        meanings = " (0: no packing)", " number of bytes (0: no grouping)", " (0: no grouping)"
        sizes = {name: count(name, m, sizes[name]) for name, m in zip(sizes, meanings, strict=True)}
        packs, max_bytes, max_group = sizes.values()
        small = GroupSmall(max_bytes, max_group) if max_bytes and max_group else UNPACKED
        self._packing: PackingRule | None = NumPacks(packs) if packs else small
        self._arguments = {"all_reduce_alg": all_reduce_alg, **sizes}
        self._program = functools.lru_cache(maxsize=256)(self._program_for)

    def _mesh_and_routes(self, devices: tuple[jax.Device, ...]) -> tuple[Mesh, tuple[Route, ...]]:
        devices = self._group if set(devices) == set(self._group) else devices
        mesh, algorithm = make_line(devices, AXIS), self._algorithm
        if algorithm == HIERARCHICAL_COPY:
            halves = len(devices) % 2 == 0  # with one device in each, it is one level again
            mesh = make_grid(devices, 2) if halves else mesh
            algorithm = "native/native" if halves else None
        options = CommunicationOptions(algorithm=algorithm) if algorithm else CommunicationOptions()
        return mesh, (Route(options, self._packing),)

    def _program_for(
        self,
        devices: tuple[jax.Device, ...],
        reduce_op: ReduceOp,
        options: CommunicationOptions,
        replicated: tuple[bool, ...],
    ) -> tuple[Any, tuple[jax.Device, ...], tuple[Route, ...]]:
        """Return an all-reduce of values over `devices`, its order of devices, and its routes.

        The options of a call take precedence over those of the routes.
        """
        mesh, routes = self._mesh_and_routes(devices)
        options, repacked = drop_deadline(options), bool(options.bytes_per_pack)
        routes = tuple(
            Route(r.options.merge(options), None if repacked else r.packing, r.limit)
            for r in routes
        )
        program = make_program("batch_reduce", mesh, reduce_batch, replicated, reduce_op, routes)
        return program, tuple(mesh.devices.flat), routes

    def _prepare(self, batch: Batch) -> list[tuple[Call, Sequence[Reduction]]]:
        # The order of replicas does not matter to a sum, unless its bits must be reproducible.
        key = tuple if batch.options.reproducible else frozenset
        together: dict[Hashable, list[Reduction]] = {}
        for r in batch.reductions:
            together.setdefault(key(r.value.devices), []).append(r)
        return [(self._call(batch, rs), rs) for rs in together.values()]

    def _call(self, batch: Batch, reductions: Sequence[Reduction]) -> Call:
        replicated = tuple([not r.value._rows for r in reductions])
        program, devices, routes = self._program(
            reductions[0].value.devices, batch.reduce_op, batch.options, replicated
        )
        # A program has one order of devices.
        values = [r.value for r in reductions]
        values = [v if v.devices == devices else v._reorder(devices) for v in values]
        settings = (batch.reduce_op, routes, batch.structure)
        trees = [value.tree for value in values]
        return Call(program, trees, devices, batch.name, batch.options, settings=settings)


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduces in one compiled program, packed; NCCL carries it on NVIDIA GPUs.

    It is an `AllReduceCrossDeviceOps` with the algorithm "nccl", and the same `num_packs` and
    errors. Other platforms use their own all-reduce.

    Examples:
      >>> grads = PerReplica([{"w": [1.0, 2.0], "b": 3.0}, {"w": [5.0, 6.0], "b": 7.0}])
      >>> NcclAllReduce(num_packs=2).reduce("mean", grads, destinations=grads)[1]["b"].tolist()
      5.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__("nccl", num_packs)
        self._arguments = {"num_packs": int(num_packs)}


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """All-reduces within each half of the devices, then between the halves.

    An even number of devices, at least four, is reduced in two halves of neighbours: a
    reduce-scatter within each half, an all-reduce of each shard between the halves, an all-gather
    within each half. Two devices, or an odd number, take one all-reduce over all. No device is left
    out. (TensorFlow's op, made for the links of a DGX-1, loses the last of an odd number.)
    Otherwise it is an `AllReduceCrossDeviceOps`, with the same `num_packs` and errors.

    Examples:
      >>> value = PerReplica([1.0, 10.0, 100.0])
      >>> HierarchicalCopyAllReduce().reduce("sum", value, value)[0].tolist()
      111.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(HIERARCHICAL_COPY, num_packs)
        self._arguments = {"num_packs": int(num_packs)}


class CollectiveAllReduce(AllReduceCrossDeviceOps):
    """All-reduces over a fixed group of devices.

    It is an `AllReduceCrossDeviceOps` for the group's devices only. `options` choose the packing,
    the algorithm and the timeout; the options of a call take precedence. With several processes,
    each passes what it holds, and gets the reduction over all: see `CrossDeviceOps`.

    Args:
      devices: this worker's devices, or device strings.
      group_size: devices of all workers together: the number of `devices`, or, with several
        processes, the number of all devices.
      options: defaults for every call.

    Raises:
      ValueError: `devices` is empty or has one twice; `group_size` is not a multiple of their
        number, or needs more workers than there are. On a call: a value lies on other devices.

    Examples:
      >>> import jax
      >>> ring = CommunicationOptions(implementation="ring")
      >>> ops = CollectiveAllReduce(jax.devices(), group_size=8, options=ring)
      >>> value = PerReplica.from_function(float)
      >>> ops.reduce("mean", value, value)[7].tolist()
      3.5
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str],
        group_size: int,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(num_packs=0)
        name = type(self).__name__
        self._group = worker = devices_named(devices, name)
        if not is_integer(group_size) or group_size < 1 or group_size % len(worker):
            multiple = f"a positive multiple of the number of devices, {len(worker)}"
            refuse("group_size", f"{multiple}, so that all workers have equally many", group_size)
        if group_size > len(worker):
            every = jax.devices()
            if set(worker) != set(jax.local_devices()) or group_size != len(every):
                there = (
                    "there is 1" if jax.process_count() == 1 else f"there are {jax.process_count()}"
                )
                raise ValueError(
                    f"`group_size` {group_size} needs {group_size // len(worker)} workers of "
                    f"{len(worker)} devices; {there}, with {len(every)} devices in total, "
                    f"{len(jax.local_devices())} of them here."
                )
            # In the order of processes, each of which passes the parts of its own devices.
            self._group = tuple(sorted(every, key=lambda device: (device.process_index, device.id)))
        self._options, self._packing = check_options(options), None
        self._arguments = {"devices": list(map(str, worker)), "group_size": int(group_size)}
        self._arguments |= {"options": self._options} if options else {}


class MultiWorkerAllReduce(AllReduceCrossDeviceOps):
    """All-reduces over workers with several devices each; array sizes choose the algorithm.

    It is an `AllReduceCrossDeviceOps` for the workers' devices only. Each array takes the first
    tuple of `all_reduce_spec` whose limit it does not exceed.

    Algorithms, in TensorFlow's names: "nccl", "xring", "pscpu", "psgpu" run over all devices;
    "nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu" reduce-scatter within each worker,
    all-reduce each shard between the workers, and all-gather within each worker. nccl is the
    backend's own, xring a ring, rechd halving and doubling, pscpu and psgpu a shuffle, in which
    each shard has an owner that sums it. Any two of them may be joined by "/", for any number of
    workers and devices.

    Args:
      worker_devices: one device string for each worker, such as "/job:worker/task:0": the workers
        get `jax.devices()` in order, `num_gpus_per_worker` each, whatever their names, so
        simulated CPU devices work too. Or one list of devices, or of device strings, for each
        worker.
      num_gpus_per_worker: devices of each worker; 0: one, as for a worker without GPUs.
      all_reduce_spec: an algorithm's name; a tuple (name, shards, limit) with optional shards
        (default 1) and limit (default -1); or a list of such tuples. Each array, after packing,
        is cut into `shards` parts, which are reduced side by side; in a shuffle (in "…/pscpu":
        the one between workers) `shards` is the number of owners, at most one for each replica
        that it runs over. `limit` is a size in bytes, inclusive; it increases from tuple to tuple,
        and is -1 (any size) in the last.
      num_packs: as in `AllReduceCrossDeviceOps`, separately for the arrays of each tuple.
      agg_small_grads_max_bytes: likewise.
      agg_small_grads_max_group: likewise.

    Raises:
      ValueError: an argument is invalid; there are too few devices, or too many shards. On a call:
        a value lies on devices other than the workers'.

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
        workers = _list_workers(worker_devices, num_gpus_per_worker, name)
        self._group = tuple(device for worker in workers for device in worker)
        self._mesh = make_grid(self._group, len(workers))
        self._routes = parse_routes(
            all_reduce_spec, self._packing, World(sizes=self._mesh.devices.shape)
        )
        del self._arguments["all_reduce_alg"]
        self._arguments = {
            "worker_devices": [list(map(str, worker)) for worker in workers],
            "num_gpus_per_worker": int(num_gpus_per_worker),
            "all_reduce_spec": all_reduce_spec,
            **self._arguments,
        }

    def _mesh_and_routes(self, devices: tuple[jax.Device, ...]) -> tuple[Mesh, tuple[Route, ...]]:
        if set(devices) == set(self._group):
            return self._mesh, self._routes
        return super()._mesh_and_routes(devices)  # one value of each process has only one level


def make_grid(devices: Sequence[jax.Device], groups: int) -> Mesh:
    """Make a mesh of two Auto axes: groups of neighbours, and the devices of a group."""
    grid = np.array(devices, dtype=object).reshape(groups, -1)
    return Mesh(grid, ("group", AXIS), axis_types=(AxisType.Auto,) * 2)


def _algorithm(name: Any) -> str | None:
    """Check a name: a canonical one, "hierarchical_copy", or None for the options' default."""
    if name == HIERARCHICAL_COPY:
        return name
    try:
        algorithm = canonical(name)
        if "/" not in algorithm:
            return None if algorithm == "native" else algorithm
    except (ValueError, AttributeError):
        pass
    algorithms = ", ".join([HIERARCHICAL_COPY, *TENSORFLOW, *DESCRIPTIONS])
    refuse("all_reduce_alg", f"one of {algorithms}", name)


def _list_workers(
    workers: Any, num_gpus_per_worker: Any, caller: str
) -> tuple[tuple[jax.Device, ...], ...]:
    """List the devices of each worker: equally many for all, no device twice."""
    meaning = " (0: workers without GPUs, of one device each)"
    per_worker = count("num_gpus_per_worker", meaning, num_gpus_per_worker) or 1
    expected = "a list with one name, or one list of devices, for each worker"
    if not isinstance(workers, list | tuple) or not workers:
        refuse("worker_devices", expected, workers)
    if all(isinstance(worker, str) and worker for worker in workers):
        twice = sorted({name for name in workers if workers.count(name) > 1})
        if twice:
            raise ValueError(f"`{caller}` got a worker twice: {', '.join(twice)}.")
        every, wanted = jax.devices(), len(workers) * per_worker
        if wanted > len(every):
            raise ValueError(
                f"`{caller}` needs {wanted} devices for {len(workers)} workers of {per_worker} "
                f"each; there are {len(every)}: {', '.join(map(str, every))}. To simulate more, "
                '`jax.config.update("jax_num_cpu_devices", n)`.'
            )
        devices = tuple(every[:wanted])
    elif all(isinstance(worker, list | tuple) for worker in workers):
        devices = devices_named([device for worker in workers for device in worker], caller)
        for i, worker in enumerate(workers):
            if len(worker) != per_worker:
                is_ = f"`num_gpus_per_worker` devices, which is {num_gpus_per_worker}"
                raise ValueError(
                    f"`{caller}` expects every worker to have {is_}; worker {i} has {len(worker)}."
                )
    else:
        refuse("worker_devices", expected, workers)
    return tuple(devices[k : k + per_worker] for k in range(0, len(devices), per_worker))
