"""The strategy over the devices of all processes."""

from __future__ import annotations

import jax

from jaxcoll._compat import settings
from jaxcoll._job.resolvers import ClusterResolver
from jaxcoll._plan.checks import refuse
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll.distribute._all_reduce_ops import CollectiveAllReduce
from jaxcoll.distribute._strategy import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on all devices of all processes, worker by worker.

    Every process makes the same calls in the same order, and passes what it holds: its own rows of
    a batch, its own value of a plain number. Values that all replicas share must be equal on all
    processes; `extended.broadcast_to` copies them from the first worker. Results are global;
    `experimental_local_results` returns those of this process's replicas.

    Args:
      cluster_resolver: lists the processes of the job, for `jc.initialize`, which is called with
        it. None: the environment lists them (TF_CONFIG, Slurm, ...), unless `jc.initialize` was
        called or JAX was used before.
      communication_options: defaults for every reduction and gather, inside `run` and between
        programs.

    Raises:
      ValueError: `cluster_resolver` is not a `ClusterResolver`, or `communication_options` is not
        a `CommunicationOptions`. `jc.initialize` raises this and other errors.

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
        if not isinstance(cluster_resolver, ClusterResolver | None):
            such = "a ClusterResolver, such as `jc.distribute.TFConfigClusterResolver()`"
            meaning = f"{such}, or None for what the environment says"
            refuse("cluster_resolver", meaning, cluster_resolver)
        options = communication_options or CommunicationOptions()
        if not isinstance(options, CommunicationOptions):
            refuse("communication_options", "a CommunicationOptions or None", options)
        if cluster_resolver is not None or not settings.has_backend():
            from jaxcoll._job.initialize import initialize

            initialize(cluster_resolver=cluster_resolver)
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        super().__init__(tuple(devices), CollectiveAllReduce(devices, len(devices)), options)
