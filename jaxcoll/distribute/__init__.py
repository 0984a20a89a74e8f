"""The names of tf.distribute. Those that its guides use are in `jaxcoll` itself too."""

from jaxcoll._job.resolvers import ClusterResolver as ClusterResolver
from jaxcoll._job.resolvers import SlurmClusterResolver as SlurmClusterResolver
from jaxcoll._job.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from jaxcoll._plan.options import CollectiveCommunication as CollectiveCommunication
from jaxcoll._plan.options import CommunicationImplementation as CommunicationImplementation
from jaxcoll._plan.options import CommunicationOptions as CommunicationOptions
from jaxcoll._plan.options import ReduceOp as ReduceOp
from jaxcoll.distribute._all_reduce_ops import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
)
from jaxcoll.distribute._all_reduce_ops import CollectiveAllReduce as CollectiveAllReduce
from jaxcoll.distribute._all_reduce_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxcoll.distribute._all_reduce_ops import MultiWorkerAllReduce as MultiWorkerAllReduce
from jaxcoll.distribute._all_reduce_ops import NcclAllReduce as NcclAllReduce
from jaxcoll.distribute._arguments import CollectiveHints as CollectiveHints
from jaxcoll.distribute._cross_device_ops import CrossDeviceOps as CrossDeviceOps
from jaxcoll.distribute._multi_worker_strategy import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from jaxcoll.distribute._one_device import ReductionToOneDevice as ReductionToOneDevice
from jaxcoll.distribute._per_replica import DistributedValues as DistributedValues
from jaxcoll.distribute._per_replica import Mirrored as Mirrored
from jaxcoll.distribute._per_replica import PerReplica as PerReplica
from jaxcoll.distribute._replica_program import ReplicaContext as ReplicaContext
from jaxcoll.distribute._replica_program import get_replica_context as get_replica_context
from jaxcoll.distribute._strategy import MirroredStrategy as MirroredStrategy
