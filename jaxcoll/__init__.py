"""Collectives for JAX programs, compiled by XLA: how replicas exchange tensors."""

from jaxcoll._host.all_reduce_ops import AllReduceCrossDeviceOps as AllReduceCrossDeviceOps
from jaxcoll._host.check_replicas import check_replicas as check_replicas
from jaxcoll._host.checkpoint import restore_checkpoint as restore_checkpoint
from jaxcoll._host.checkpoint import save_checkpoint as save_checkpoint
from jaxcoll._host.cluster_resolver import ClusterResolver as ClusterResolver
from jaxcoll._host.cluster_resolver import SlurmClusterResolver as SlurmClusterResolver
from jaxcoll._host.cluster_resolver import TFConfigClusterResolver as TFConfigClusterResolver
from jaxcoll._host.collective_all_reduce import CollectiveAllReduce as CollectiveAllReduce
from jaxcoll._host.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from jaxcoll._host.data_parallel import DataParallel as DataParallel
from jaxcoll._host.data_parallel import data_parallel as data_parallel
from jaxcoll._host.elastic import Elastic as Elastic
from jaxcoll._host.elastic import WorldChange as WorldChange
from jaxcoll._host.for_optax import all_reduce_updates as all_reduce_updates
from jaxcoll._host.gradients import accumulate as accumulate
from jaxcoll._host.gradients import grad as grad
from jaxcoll._host.gradients import sync_in_backward as sync_in_backward
from jaxcoll._host.gradients import value_and_grad as value_and_grad
from jaxcoll._host.hierarchical_copy import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxcoll._host.in_program import all_gather as all_gather
from jaxcoll._host.in_program import all_reduce as all_reduce
from jaxcoll._host.in_program import broadcast as broadcast
from jaxcoll._host.in_program import reduce_scatter as reduce_scatter
from jaxcoll._host.in_step import all_finite as all_finite
from jaxcoll._host.in_step import global_norm as global_norm
from jaxcoll._host.in_step import reduce_metrics as reduce_metrics
from jaxcoll._host.initialize import initialize as initialize
from jaxcoll._host.mirrored_strategy import MirroredStrategy as MirroredStrategy
from jaxcoll._host.mirrored_strategy import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from jaxcoll._host.multi_worker_all_reduce import MultiWorkerAllReduce as MultiWorkerAllReduce
from jaxcoll._host.n_devices import n_devices_equal_one as n_devices_equal_one
from jaxcoll._host.nccl_all_reduce import NcclAllReduce as NcclAllReduce
from jaxcoll._host.one_device import ReductionToOneDevice as ReductionToOneDevice
from jaxcoll._host.plan import plan as plan
from jaxcoll._host.replica_context import ReplicaContext as ReplicaContext
from jaxcoll._host.replica_context import get_replica_context as get_replica_context
from jaxcoll._host.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from jaxcoll._host.sharded_optimizer import sharded_optimizer as sharded_optimizer
from jaxcoll._host.values import DistributedValues as DistributedValues
from jaxcoll._host.values import Mirrored as Mirrored
from jaxcoll._host.values import PerReplica as PerReplica
from jaxcoll._look.inspect import assert_collectives as assert_collectives
from jaxcoll._look.inspect import inspect as inspect
from jaxcoll._observe.report import Report as Report
from jaxcoll._plan.errors import AlreadyReducedError as AlreadyReducedError
from jaxcoll._plan.errors import DeadlineExceededError as DeadlineExceededError
from jaxcoll._plan.errors import PeerLostError as PeerLostError
from jaxcoll._plan.errors import ProgramMismatchError as ProgramMismatchError
from jaxcoll._plan.errors import ReductionCorruptedError as ReductionCorruptedError
from jaxcoll._plan.errors import ReductionInLoopWarning as ReductionInLoopWarning
from jaxcoll._plan.errors import ReplicaDivergenceError as ReplicaDivergenceError
from jaxcoll._plan.errors import SameRowsWarning as SameRowsWarning
from jaxcoll._plan.hints import CollectiveHints as CollectiveHints
from jaxcoll._plan.options import UNSET as UNSET
from jaxcoll._plan.options import CollectiveCommunication as CollectiveCommunication
from jaxcoll._plan.options import CommunicationImplementation as CommunicationImplementation
from jaxcoll._plan.options import CommunicationOptions as CommunicationOptions
from jaxcoll._plan.options import ReduceOp as ReduceOp
from jaxcoll._plan.plan import Plan as Plan
from jaxcoll._spmd.check_replicas import ReplicaCheck as ReplicaCheck
from jaxcoll._spmd.indexed_slices import IndexedSlices as IndexedSlices
from jaxcoll._spmd.loss import WeightedLoss as WeightedLoss
from jaxcoll._spmd.metrics import Total as Total
from jaxcoll._spmd.metrics import WeightedMean as WeightedMean
from jaxcoll._spmd.shards import Shards as Shards

__version__ = "0.1.0"
