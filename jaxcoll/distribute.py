"""The names of tf.distribute. Those that its guides use are in `jaxcoll` itself too."""

from jaxcoll._distribute.all_reduce_ops import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
)
from jaxcoll._distribute.all_reduce_ops import CollectiveAllReduce as CollectiveAllReduce
from jaxcoll._distribute.all_reduce_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxcoll._distribute.all_reduce_ops import MultiWorkerAllReduce as MultiWorkerAllReduce
from jaxcoll._distribute.all_reduce_ops import NcclAllReduce as NcclAllReduce
from jaxcoll._distribute.arguments import CollectiveHints as CollectiveHints
from jaxcoll._distribute.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from jaxcoll._distribute.multi_worker_strategy import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from jaxcoll._distribute.one_device import ReductionToOneDevice as ReductionToOneDevice
from jaxcoll._distribute.per_replica import DistributedValues as DistributedValues
from jaxcoll._distribute.per_replica import Mirrored as Mirrored
from jaxcoll._distribute.per_replica import PerReplica as PerReplica
from jaxcoll._distribute.replica_program import ReplicaContext as ReplicaContext
from jaxcoll._distribute.replica_program import get_replica_context as get_replica_context
from jaxcoll._distribute.strategy import MirroredStrategy as MirroredStrategy
from jaxcoll._job.resolvers import ClusterResolver as ClusterResolver
from jaxcoll._job.resolvers import SlurmClusterResolver as SlurmClusterResolver
from jaxcoll._job.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from jaxcoll._plan.options import CollectiveCommunication as CollectiveCommunication
from jaxcoll._plan.options import CommunicationImplementation as CommunicationImplementation
from jaxcoll._plan.options import CommunicationOptions as CommunicationOptions
from jaxcoll._plan.options import ReduceOp as ReduceOp
