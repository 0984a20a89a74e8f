"""Collectives for JAX programs, compiled by XLA: how replicas exchange tensors."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from jaxcoll import compression as compression
    from jaxcoll import distribute as distribute
    from jaxcoll import errors as errors
    from jaxcoll._api.alike import broadcast as broadcast
    from jaxcoll._api.alike import same as same
    from jaxcoll._api.collectives import all_reduce as all_reduce
    from jaxcoll._api.collectives import pmean as pmean
    from jaxcoll._api.collectives import psum as psum
    from jaxcoll._api.gradients import accumulate as accumulate
    from jaxcoll._api.gradients import grad as grad
    from jaxcoll._api.gradients import mean_loss as mean_loss
    from jaxcoll._api.gradients import scan_layers as scan_layers
    from jaxcoll._api.gradients import sync_in_backward as sync_in_backward
    from jaxcoll._api.gradients import value_and_grad as value_and_grad
    from jaxcoll._api.halves import all_gather as all_gather
    from jaxcoll._api.halves import reduce_scatter as reduce_scatter
    from jaxcoll._api.metrics import all_finite as all_finite
    from jaxcoll._api.metrics import global_norm as global_norm
    from jaxcoll._api.metrics import reduce_metrics as reduce_metrics
    from jaxcoll._cluster.initialize import initialize as initialize
    from jaxcoll._cluster.launch.function import launch as launch
    from jaxcoll._distribute.check_replicas import check_replicas as check_replicas
    from jaxcoll._elastic.checkpoint import restore_checkpoint as restore_checkpoint
    from jaxcoll._elastic.checkpoint import save_checkpoint as save_checkpoint
    from jaxcoll._elastic.trainer import Elastic as Elastic
    from jaxcoll._inspect import inspect as inspect
    from jaxcoll._mesh.plan import plan as plan
    from jaxcoll._observe.limits import assert_collectives as assert_collectives
    from jaxcoll._plan.options import CommunicationImplementation as CommunicationImplementation
    from jaxcoll._plan.options import CommunicationOptions as CommunicationOptions
    from jaxcoll._plan.options import ReduceOp as ReduceOp
    from jaxcoll._spmd.gradients.loss import WeightedLoss as WeightedLoss
    from jaxcoll._spmd.metrics import Total as Total
    from jaxcoll._spmd.metrics import WeightedMean as WeightedMean
    from jaxcoll._spmd.shards import Shards as Shards
    from jaxcoll._spmd.sparse import IndexedSlices as IndexedSlices
    from jaxcoll._step.data_parallel import data_parallel as data_parallel
    from jaxcoll._train.batches import batches as batches
    from jaxcoll._train.diloco import diloco as diloco
    from jaxcoll._train.optax_link import all_reduce_updates as all_reduce_updates
    from jaxcoll._train.shard import shard as shard
    from jaxcoll._train.shard import unshard as unshard
    from jaxcoll._train.sharded_optimizer import sharded_optimizer as sharded_optimizer
    from jaxcoll._train.step_test import assert_same_as_one_device as assert_same_as_one_device
    from jaxcoll._watch.watch import inspecting as inspecting
    from jaxcoll.distribute import CollectiveHints as CollectiveHints
    from jaxcoll.distribute import DistributedValues as DistributedValues
    from jaxcoll.distribute import MirroredStrategy as MirroredStrategy
    from jaxcoll.distribute import MultiWorkerAllReduce as MultiWorkerAllReduce
    from jaxcoll.distribute import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from jaxcoll.distribute import NcclAllReduce as NcclAllReduce
    from jaxcoll.distribute import PerReplica as PerReplica
    from jaxcoll.distribute import get_replica_context as get_replica_context

__version__ = "0.3.0"

_LATER = {
    name: f"jaxcoll.{module}"
    for module, names in {
        "_api.alike": "broadcast same",
        "_api.collectives": "all_reduce pmean psum",
        "_api.gradients": "accumulate grad mean_loss scan_layers sync_in_backward value_and_grad",
        "_api.halves": "all_gather reduce_scatter",
        "_api.metrics": "all_finite global_norm reduce_metrics",
        "_cluster.initialize": "initialize",
        "_cluster.launch.function": "launch",
        "_distribute.check_replicas": "check_replicas",
        "_elastic.checkpoint": "restore_checkpoint save_checkpoint",
        "_elastic.trainer": "Elastic",
        "_inspect": "inspect",
        "_mesh.plan": "plan",
        "_observe.limits": "assert_collectives",
        "_plan.options": "CommunicationImplementation CommunicationOptions ReduceOp",
        "_spmd.gradients.loss": "WeightedLoss",
        "_spmd.metrics": "Total WeightedMean",
        "_spmd.shards": "Shards",
        "_spmd.sparse": "IndexedSlices",
        "_step.data_parallel": "data_parallel",
        "_train.batches": "batches",
        "_train.diloco": "diloco",
        "_train.optax_link": "all_reduce_updates",
        "_train.shard": "shard unshard",
        "_train.sharded_optimizer": "sharded_optimizer",
        "_train.step_test": "assert_same_as_one_device",
        "_watch.watch": "inspecting",
        "compression": "compression",
        "distribute": "distribute CollectiveHints DistributedValues MirroredStrategy PerReplica "
        "MultiWorkerAllReduce MultiWorkerMirroredStrategy NcclAllReduce get_replica_context",
        "errors": "errors",
    }.items()
    for name in names.split()
}
"""The module of each public name, imported when the name is first used."""

__all__ = [*_LATER]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        import sys

        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    module = _import_module(_LATER[name])
    if name == "initialize":
        vars(module)["report_hangs"] = _report_hangs
    value = globals()[name] = getattr(module, name, module)
    return value


def _report_hangs(seconds: float) -> None:
    from jaxcoll._watch.hang import report_hangs

    report_hangs(seconds)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
