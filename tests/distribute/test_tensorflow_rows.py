"""Rows of parts F, G and L of facts/tensorflow_cases.md: reductions between programs."""

import json
import threading
import time
import types

import jax
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll import CollectiveAllReduce, PerReplica


def devices(n):
    return jax.devices()[:n]


def test_F23_threads_that_launch_in_crossing_order_do_not_interleave():
    ops = [CollectiveAllReduce(devices(2), 2) for _ in range(2)]
    values = [[PerReplica([k, k]) for _ in range(2)] for k in (1.0, 2.0)]
    start, got = threading.Barrier(2), {}

    def launch(who):
        for _ in range(20):
            start.wait(60)
            batch = [(v, v) for v in values[who]]
            got[who] = [x[1].item() for x in ops[who].batch_reduce("sum", batch)]

    threads = [threading.Thread(target=launch, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert got == {0: [2.0, 2.0], 1: [4.0, 4.0]}


def test_F25_F26_F28_a_deadline_is_kept_dense_and_sparse(monkeypatch):
    """With one process nobody can be missing: a wait stands for the absent one."""
    options = jc.CommunicationOptions(timeout_seconds=0.05)
    dense = PerReplica([1.0, 1.0])
    sparse = PerReplica([jc.IndexedSlices([1.0], [0], (5,))] * 2)
    ops = CollectiveAllReduce(devices(2), 2)
    with monkeypatch.context() as patched:
        slow = types.SimpleNamespace(compiled=lambda *_: time.sleep(0.5))
        patched.setattr("jaxcoll._dispatch.dispatch.compiled_for", lambda call, shared: slow)
        for pairs in ([(dense, dense)], [(dense, dense)] * 2, [(sparse, sparse)] * 2):
            with pytest.raises(jc.DeadlineExceededError, match="did not finish within 0.05 s"):
                ops.batch_reduce("sum", pairs, options)
    assert ops.reduce("sum", dense, dense)[0].item() == 2.0
    assert ops.reduce("sum", sparse, sparse)[0].to_dense()[0] == 2.0


def test_G13_G14_G34_L56_a_wrong_value_disables_nothing():
    ops = CollectiveAllReduce(devices(2), 2)
    good = PerReplica([1.0, 2.0])
    for _ in range(2):
        assert ops.reduce("sum", good, good)[0].item() == 3.0
        with pytest.raises(ValueError, match=r"has shape \(2,\) on replica 1, \(4,\) on replica 0"):
            PerReplica([np.arange(4.0), np.arange(2.0)])
        with pytest.raises(TypeError, match="unsupported operand"):
            jax.jit(lambda x: x + "no number")(1.0)
    assert ops.reduce("sum", good, good)[1].item() == 3.0


def test_G47_many_reductions_of_a_group_of_one():
    ops = CollectiveAllReduce(devices(1), 1)
    value = PerReplica([[1.0]])
    for _ in range(1000):
        result = ops.reduce("sum", value, value)
    assert [x.item() for x in result] == [1.0]


def test_G50_no_device_and_nothing_to_reduce():
    with pytest.raises(ValueError, match="got no devices"):
        CollectiveAllReduce([], 0)
    with pytest.raises(ValueError, match="got no values; it needs at least one replica"):
        PerReplica([])


@pytest.mark.parametrize(
    "name", ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"]
)
def test_L38_L40_trees_and_integers_beside_floats(name):
    ops = getattr(jc, name)()
    value = PerReplica([{"a": 1.0, "b": (2.0, [3.0])}] * 2)
    assert jax.tree.map(float, ops.reduce("sum", value, value)[1]) == {"a": 2, "b": (4, [6])}
    integers = PerReplica([(1, 2, np.float32(1)), (2, 3, np.float32(2))])
    first, second, beside = ops.reduce("sum", integers, integers)[0]
    assert (int(first), int(second), float(beside)) == (3, 5, 3.0)
    assert (first.dtype, beside.dtype) == (np.int32, np.float32)


def test_L31_L43_sparse_stays_sparse_without_a_program_of_ones_own():
    value = PerReplica([jc.IndexedSlices([[1.0]], [0], (5, 1))] * 2)
    got = jc.NcclAllReduce().reduce("sum", value, value)[0]
    assert isinstance(got, jc.IndexedSlices)
    assert (got.values.tolist(), got.indices.tolist()) == ([[1.0], [1.0]], [0, 0])


def resolver(cluster, kind=None, index=None, more=None, **said):
    task = {} if kind is None else {"type": kind, "index": index}
    config = {"cluster": cluster, "task": task, **(more or {})}
    return jc.TFConfigClusterResolver(environment={"TF_CONFIG": json.dumps(config)}, **said)


TWO_JOBS = {"ps": ["ps0:2222", "ps1:2222"], "worker": [f"worker{k}:2222" for k in range(3)]}


def test_K14_K16_K17_K19_K20_what_a_resolver_reads():
    found = resolver(TWO_JOBS, "ps", 0)
    assert found.cluster_spec() == {job: tuple(tasks) for job, tasks in TWO_JOBS.items()}
    assert (found.master(), found.master("worker", 1)) == ("ps0:2222", "worker1:2222")
    assert resolver(TWO_JOBS, "ps", 0, {"rpc_layer": "grpc"}).master() == "grpc://ps0:2222"
    typed = resolver(TWO_JOBS, 123456, "1")
    assert (typed.task_type, typed.task_id) == ("123456", 1)
    assert resolver({}).master() == ""
    for alone in (resolver({"worker": ["a:1"]}), resolver({"worker": ["a:1"]}, "worker", 0)):
        assert alone.master() == "", "there is nobody else to connect to"


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "words"),
    [
        ({"worker": ["a:1", "b:1"]}, "chief", 0, "a task of job 'chief', and the cluster has the"),
        ({"worker": ["a:1", "b:1"]}, "worker", 2, "task 2 of job 'worker', which has 2"),
        (TWO_JOBS, "ps", 0, "there are parameter servers"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "there can be one chief; got a:1, b:1"),
        (["a:1"], "worker", 0, "'cluster' must be a JSON object"),
    ],
)
def test_K22_what_a_resolver_refuses(cluster, kind, index, words):
    with pytest.raises(ValueError, match=words):
        resolver(cluster, kind, index).member()
