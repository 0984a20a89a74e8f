"""Collectives for JAX programs, compiled by XLA: how replicas exchange tensors."""

from jaxcoll import distribute as distribute
from jaxcoll._api.collectives import all_gather as all_gather
from jaxcoll._api.collectives import all_reduce as all_reduce
from jaxcoll._api.collectives import broadcast as broadcast
from jaxcoll._api.collectives import reduce_scatter as reduce_scatter
from jaxcoll._api.gradients import accumulate as accumulate
from jaxcoll._api.gradients import grad as grad
from jaxcoll._api.gradients import sync_in_backward as sync_in_backward
from jaxcoll._api.gradients import value_and_grad as value_and_grad
from jaxcoll._api.layers import scan_layers as scan_layers
from jaxcoll._api.metrics import all_finite as all_finite
from jaxcoll._api.metrics import global_norm as global_norm
from jaxcoll._api.metrics import reduce_metrics as reduce_metrics
from jaxcoll._cluster.initialize import initialize as initialize
from jaxcoll._cluster.launch.function import launch as launch
from jaxcoll._cluster.resolvers import ClusterResolver as ClusterResolver
from jaxcoll._cluster.resolvers import SlurmClusterResolver as SlurmClusterResolver
from jaxcoll._cluster.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from jaxcoll._distribute.check_replicas import check_replicas as check_replicas
from jaxcoll._distribute.ops.all_reduce_ops import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
)
from jaxcoll._distribute.ops.all_reduce_ops import CollectiveAllReduce as CollectiveAllReduce
from jaxcoll._distribute.ops.all_reduce_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxcoll._distribute.ops.all_reduce_ops import NcclAllReduce as NcclAllReduce
from jaxcoll._distribute.ops.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from jaxcoll._distribute.ops.hints import CollectiveHints as CollectiveHints
from jaxcoll._distribute.ops.multi_worker_all_reduce import (
    MultiWorkerAllReduce as MultiWorkerAllReduce,
)
from jaxcoll._distribute.ops.one_device import ReductionToOneDevice as ReductionToOneDevice
from jaxcoll._distribute.strategy.mirrored import MirroredStrategy as MirroredStrategy
from jaxcoll._distribute.strategy.mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from jaxcoll._distribute.strategy.replica_context import ReplicaContext as ReplicaContext
from jaxcoll._distribute.strategy.replica_context import get_replica_context as get_replica_context
from jaxcoll._distribute.values.per_replica import DistributedValues as DistributedValues
from jaxcoll._distribute.values.per_replica import Mirrored as Mirrored
from jaxcoll._distribute.values.per_replica import PerReplica as PerReplica
from jaxcoll._elastic.checkpoint import restore_checkpoint as restore_checkpoint
from jaxcoll._elastic.checkpoint import save_checkpoint as save_checkpoint
from jaxcoll._elastic.generation import WorldChange as WorldChange
from jaxcoll._elastic.trainer import Elastic as Elastic
from jaxcoll._errors import AlreadyReducedError as AlreadyReducedError
from jaxcoll._errors import DeadlineExceededError as DeadlineExceededError
from jaxcoll._errors import LaunchError as LaunchError
from jaxcoll._errors import PeerLostError as PeerLostError
from jaxcoll._errors import ProgramMismatchError as ProgramMismatchError
from jaxcoll._errors import ReductionCorruptedError as ReductionCorruptedError
from jaxcoll._errors import ReductionInLoopWarning as ReductionInLoopWarning
from jaxcoll._errors import ReplicaDivergenceError as ReplicaDivergenceError
from jaxcoll._errors import SameRowsWarning as SameRowsWarning
from jaxcoll._inspect import assert_collectives as assert_collectives
from jaxcoll._inspect import inspect as inspect
from jaxcoll._mesh.plan import plan as plan
from jaxcoll._observe.report import Report as Report
from jaxcoll._plan.options import UNSET as UNSET
from jaxcoll._plan.options import CollectiveCommunication as CollectiveCommunication
from jaxcoll._plan.options import CommunicationImplementation as CommunicationImplementation
from jaxcoll._plan.options import CommunicationOptions as CommunicationOptions
from jaxcoll._plan.options import ReduceOp as ReduceOp
from jaxcoll._plan.plan import Plan as Plan
from jaxcoll._plan.wire_formats import Bf16 as Bf16
from jaxcoll._plan.wire_formats import Int4 as Int4
from jaxcoll._plan.wire_formats import Int8 as Int8
from jaxcoll._plan.wire_formats import PowerSGD as PowerSGD
from jaxcoll._spmd.checks.check_replicas import ReplicaCheck as ReplicaCheck
from jaxcoll._spmd.gradients.loss import WeightedLoss as WeightedLoss
from jaxcoll._spmd.indexed_slices import IndexedSlices as IndexedSlices
from jaxcoll._spmd.metrics import Total as Total
from jaxcoll._spmd.metrics import WeightedMean as WeightedMean
from jaxcoll._spmd.shards import Shards as Shards
from jaxcoll._step.data_parallel import DataParallel as DataParallel
from jaxcoll._step.data_parallel import data_parallel as data_parallel
from jaxcoll._train.batches import Batches as Batches
from jaxcoll._train.batches import batches as batches
from jaxcoll._train.batches import prefetch as prefetch
from jaxcoll._train.local_state import LocalState as LocalState
from jaxcoll._train.local_updates import LocalUpdates as LocalUpdates
from jaxcoll._train.local_updates import local_updates as local_updates
from jaxcoll._train.optax_link import all_reduce_updates as all_reduce_updates
from jaxcoll._train.residual import residual as residual
from jaxcoll._train.shard import shard as shard
from jaxcoll._train.shard import unshard as unshard
from jaxcoll._train.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from jaxcoll._train.sharded_optimizer import sharded_optimizer as sharded_optimizer
from jaxcoll._train.step_test import n_devices_equal_one as n_devices_equal_one

__version__ = "0.2.0"
