"""Collectives for JAX programs, compiled by XLA: how replicas exchange tensors."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from jaxcoll import compression as compression
    from jaxcoll import distribute as distribute
    from jaxcoll import errors as errors
    from jaxcoll._collectives.all_gather import all_gather as all_gather
    from jaxcoll._collectives.all_reduce import all_reduce as all_reduce
    from jaxcoll._collectives.broadcast import broadcast as broadcast
    from jaxcoll._collectives.psum import pmean as pmean
    from jaxcoll._collectives.psum import psum as psum
    from jaxcoll._collectives.reduce_scatter import reduce_scatter as reduce_scatter
    from jaxcoll._collectives.same import same as same
    from jaxcoll._collectives.shards import Shards as Shards
    from jaxcoll._collectives.sparse import IndexedSlices as IndexedSlices
    from jaxcoll._gradients.accumulate import accumulate as accumulate
    from jaxcoll._gradients.layers.scan_layers import scan_layers as scan_layers
    from jaxcoll._gradients.loss import WeightedLoss as WeightedLoss
    from jaxcoll._gradients.mean_loss import mean_loss as mean_loss
    from jaxcoll._gradients.metrics import Total as Total
    from jaxcoll._gradients.metrics import WeightedMean as WeightedMean
    from jaxcoll._gradients.metrics import reduce_metrics as reduce_metrics
    from jaxcoll._gradients.norms import all_finite as all_finite
    from jaxcoll._gradients.norms import global_norm as global_norm
    from jaxcoll._gradients.sync_in_backward import sync_in_backward as sync_in_backward
    from jaxcoll._gradients.value_and_grad import grad as grad
    from jaxcoll._gradients.value_and_grad import value_and_grad as value_and_grad
    from jaxcoll._job.initialize import initialize as initialize
    from jaxcoll._job.launch.function import launch as launch
    from jaxcoll._plan.options import CommunicationImplementation as CommunicationImplementation
    from jaxcoll._plan.options import CommunicationOptions as CommunicationOptions
    from jaxcoll._plan.options import ReduceOp as ReduceOp
    from jaxcoll._report.inspect import inspect as inspect
    from jaxcoll._report.limits import assert_collectives as assert_collectives
    from jaxcoll._report.profile.watch import inspecting as inspecting
    from jaxcoll._report.show_plan import plan as plan
    from jaxcoll._step.data_parallel import data_parallel as data_parallel
    from jaxcoll._train.batches import batches as batches
    from jaxcoll._train.diloco import diloco as diloco
    from jaxcoll._train.elastic.checkpoint import restore_checkpoint as restore_checkpoint
    from jaxcoll._train.elastic.checkpoint import save_checkpoint as save_checkpoint
    from jaxcoll._train.elastic.trainer import Elastic as Elastic
    from jaxcoll._train.optax_link import all_reduce_updates as all_reduce_updates
    from jaxcoll._train.shard import shard as shard
    from jaxcoll._train.shard import unshard as unshard
    from jaxcoll._train.sharded_optimizer import sharded_optimizer as sharded_optimizer
    from jaxcoll._train.step_test import assert_same_as_one_device as assert_same_as_one_device
    from jaxcoll.distribute import CollectiveHints as CollectiveHints
    from jaxcoll.distribute import DistributedValues as DistributedValues
    from jaxcoll.distribute import MirroredStrategy as MirroredStrategy
    from jaxcoll.distribute import MultiWorkerAllReduce as MultiWorkerAllReduce
    from jaxcoll.distribute import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from jaxcoll.distribute import NcclAllReduce as NcclAllReduce
    from jaxcoll.distribute import PerReplica as PerReplica
    from jaxcoll.distribute import get_replica_context as get_replica_context
    from jaxcoll.distribute._check_replicas import check_replicas as check_replicas

__version__ = "0.3.0"

_LATER = {
    name: f"jaxcoll.{module}"
    for module, names in {
        "_collectives.broadcast": "broadcast",
        "_collectives.same": "same",
        "_collectives.all_reduce": "all_reduce",
        "_collectives.psum": "pmean psum",
        "_gradients.accumulate": "accumulate",
        "_gradients.value_and_grad": "grad value_and_grad",
        "_gradients.mean_loss": "mean_loss",
        "_gradients.sync_in_backward": "sync_in_backward",
        "_gradients.layers.scan_layers": "scan_layers",
        "_collectives.all_gather": "all_gather",
        "_collectives.reduce_scatter": "reduce_scatter",
        "_gradients.norms": "all_finite global_norm",
        "_job.initialize": "initialize",
        "_job.launch.function": "launch",
        "distribute._check_replicas": "check_replicas",
        "_train.elastic.checkpoint": "restore_checkpoint save_checkpoint",
        "_train.elastic.trainer": "Elastic",
        "_report.inspect": "inspect",
        "_report.show_plan": "plan",
        "_report.limits": "assert_collectives",
        "_plan.options": "CommunicationImplementation CommunicationOptions ReduceOp",
        "_gradients.loss": "WeightedLoss",
        "_gradients.metrics": "Total WeightedMean reduce_metrics",
        "_collectives.shards": "Shards",
        "_collectives.sparse": "IndexedSlices",
        "_step.data_parallel": "data_parallel",
        "_train.batches": "batches",
        "_train.diloco": "diloco",
        "_train.optax_link": "all_reduce_updates",
        "_train.shard": "shard unshard",
        "_train.sharded_optimizer": "sharded_optimizer",
        "_train.step_test": "assert_same_as_one_device",
        "_report.profile.watch": "inspecting",
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
    _import_module("jaxcoll._compat.settings")  # removes our frames from tracebacks
    _import_module("jaxcoll._step.mesh.world")  # sets the scope of calls outside `data_parallel`
    module = _import_module(_LATER[name])
    if name == "initialize":
        vars(module)["report_hangs"] = _report_hangs
    value = globals()[name] = getattr(module, name, module)
    return value


def _report_hangs(seconds: float) -> None:
    from jaxcoll._report.hang.monitor import report_hangs

    report_hangs(seconds)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
