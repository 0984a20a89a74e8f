"""The strategies: over the devices of one process, or over those of all."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxcoll import _compat
from jaxcoll._cluster.resolvers import ClusterResolver
from jaxcoll._distribute.ops.all_reduce_ops import CollectiveAllReduce, NcclAllReduce
from jaxcoll._distribute.ops.cross_device_ops import CrossDeviceOps
from jaxcoll._distribute.strategy.strategy import Strategy
from jaxcoll._distribute.values.destinations import check_here, devices_named
from jaxcoll._mesh.mesh import span_processes
from jaxcoll._plan.options import CommunicationOptions


class MirroredStrategy(Strategy):
    """Replicas on the devices of one process.

    Args:
      devices: devices or device strings, a replica on each, in this order. None: all of this
        process.
      cross_device_ops: what reduces and gathers between programs; None: `NcclAllReduce()`. A
        reduction inside `run` is compiled into its program, and follows options instead.

    Raises:
      ValueError: there is no device, one is listed twice or is not a device, they belong to several
        processes or to another one, or `cross_device_ops` is not a `CrossDeviceOps`.

    Examples:
      >>> strategy = MirroredStrategy()
      >>> shares = strategy.experimental_distribute_values_from_function(
      ...     lambda context: context.replica_id_in_sync_group)
      >>> int(strategy.reduce("sum", shares, axis=None))
      28
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if devices is not None and not isinstance(devices, list | tuple):
            raise ValueError(
                "`MirroredStrategy` expects a list or tuple of devices or device strings, or None; "
                f"got {devices!r}."
            )
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise ValueError(
                "`MirroredStrategy` expects `cross_device_ops` to be a CrossDeviceOps, such as "
                f"`jc.NcclAllReduce()`, or None; got {cross_device_ops!r}."
            )
        line = devices_named(
            jax.local_devices() if devices is None else devices, "MirroredStrategy"
        )
        if span_processes(line):
            raise ValueError(
                "`MirroredStrategy` has its replicas in one process; these devices belong to "
                f"several: {', '.join(map(str, line))}. `MultiWorkerMirroredStrategy` spans them."
            )
        check_here(line[0])
        super().__init__(line, cross_device_ops or NcclAllReduce(), CommunicationOptions())


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on all devices of all processes, worker by worker.

    Every process makes the same calls in the same order, and passes what it holds: its own rows of
    a batch, its own value of a plain number. What all replicas share must be equal on all;
    `extended.broadcast_to` makes it so, from the first worker's. Results are global, and
    `experimental_local_results` has those of this process's replicas.

    Args:
      cluster_resolver: says which processes there are, as for `jc.initialize`, which is called.
        None: the environment says so (TF_CONFIG, Slurm, ...), unless `jc.initialize` was called
        or JAX was used before.
      communication_options: defaults for every reduction and gather, inside `run` and between
        programs.

    Raises:
      ValueError: `cluster_resolver` is not a `ClusterResolver`, or `communication_options` is not
        a `CommunicationOptions`; and, like all other errors, from `jc.initialize`.

    Examples:
      >>> options = CommunicationOptions(bytes_per_pack=1 << 20)
      >>> MultiWorkerMirroredStrategy(communication_options=options).num_replicas_in_sync
      8
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise ValueError(
                "`MultiWorkerMirroredStrategy` expects `cluster_resolver` to be a ClusterResolver, "
                "such as `jc.distribute.TFConfigClusterResolver()`, or None for what the "
                f"environment says; got {cluster_resolver!r}."
            )
        options = communication_options or CommunicationOptions()
        if not isinstance(options, CommunicationOptions):
            raise ValueError(
                "`communication_options` must be a CommunicationOptions or None; got "
                f"{communication_options!r}."
            )
        if cluster_resolver is not None or not _compat.has_backend():
            from jaxcoll._cluster.initialize import initialize

            initialize(cluster_resolver=cluster_resolver)
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        super().__init__(tuple(devices), CollectiveAllReduce(devices, len(devices)), options)
