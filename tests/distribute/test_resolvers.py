"""TFConfigClusterResolver: rows of facts/tensorflow_cases.md, part K."""

import json

import pytest

import jaxcoll as jc


def resolver(cluster, kind=None, index=None, more=None, **settings):
    task = {} if kind is None else {"type": kind, "index": index}
    config = {"cluster": cluster, "task": task, **(more or {})}
    return jc.distribute.TFConfigClusterResolver(
        environment={"TF_CONFIG": json.dumps(config)}, **settings
    )


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
