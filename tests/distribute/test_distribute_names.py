"""`jaxcoll.distribute`: tf.distribute's names by themselves."""

import inspect

import jaxcoll as jc
from jaxcoll import distribute

NAMES = {name for name in vars(distribute) if not name.startswith("_")}


def test_a_name_that_the_package_has_too_is_the_same_object():
    assert all(getattr(distribute, name) is getattr(jc, name) for name in NAMES & set(dir(jc)))


def test_what_tensorflow_users_look_for_is_there():
    family = {
        name
        for name, value in vars(distribute).items()
        if inspect.isclass(value)
        and issubclass(
            value,
            jc.distribute.CrossDeviceOps | jc.DistributedValues | jc.distribute.ClusterResolver,
        )
    }
    assert NAMES >= family | {
        *("MirroredStrategy", "MultiWorkerMirroredStrategy", "ReplicaContext"),
        *("get_replica_context", "CollectiveHints", "CommunicationOptions", "ReduceOp"),
    }
