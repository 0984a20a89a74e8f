"""Which process of which job this is, by the variables that launchers leave."""

import dataclasses
import json

import pytest

from jaxcoll._job import launchers
from jaxcoll._job.launchers import read_member
from jaxcoll._job.specs import Member, host_and_port, parse_counts, parse_hosts

LAUNCH = {"JAXCOLL_COORDINATOR": "127.0.0.1:5", "JAXCOLL_PROCESSES": "4", "JAXCOLL_RANK": "3"}
SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[007-009,12],x", "SLURM_NTASKS": "10",
    "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x5)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TRAINER = {
    "JAX_COORDINATOR_ADDRESS": "t-node-0-0.t:29500", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2",
}  # fmt: skip
JAX_JOB = {
    "COORDINATOR_ADDRESS": "t-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "4", "PROCESS_ID": "2",
}  # fmt: skip
TORCH = {
    "MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
}  # fmt: skip


def gpus(visible, on_node, *, tasks="2(x5)", node="node007", local="1"):
    hosts = {"SLURM_STEP_NODELIST": "x,y"} if node in "xy" else {}
    hosts |= {"SLURM_JOB_ID": "4097"}
    return {
        **SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURMD_NODENAME": node, "SLURM_LOCALID": local,
        "CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": str(on_node), **hosts,
    }  # fmt: skip


def tf(cluster, kind=None, index=None, **more):
    task = {"type": kind, "index": index} if kind else {}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **more})}


WORKERS = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}


PLACES = [
        ({}, None),
        (LAUNCH, ("127.0.0.1:5", 4, 3, None)),
        (tf(WORKERS, "worker", "1"), ("a:1", 3, 2, None)),
        (tf({"worker": {"1": "b:1", "0": "a:1"}}, "worker", 0), ("a:1", 2, 0, None)),
        (tf(WORKERS, "evaluator", 0), None),
        ({"TF_CONFIG": "{}"}, None),
        (SLURM, ("node007:61441", 10, 9, (1,))),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x10)"}, ("node007:61441", 10, 9, None)),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),
        (OPEN_MPI, ("10.96.0.1:62624", 4, 2, None)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("10.96.0.1:62624", 4, 2, (0,))),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,2620::2]:43"}, ("[fe80::1]:61441", 4, 2, None)),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}, (None, 4, 2, None)),
        (TORCH, ("a:29500", 2, 1, (1,))),
        ({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "::1"}, ("[::1]:29501", 2, 1, (1,))),
        ({**TORCH, **SLURM, "JAX_COORDINATOR_ADDRESS": "z:9"}, ("z:9", 10, 9, (1,))),
        ({"RANK": "1", "WORLD_SIZE": "2", "JAX_COORDINATOR_ADDRESS": "z:9"}, ("z:9", 2, 1, None)),
        ({**SLURM, "SLURM_STEP_ID": "2"}, ("node007:61563", 10, 9, (1,))),
        ({**SLURM, **OPEN_MPI}, ("10.96.0.1:62624", 4, 2, None)),
        ({**SLURM, **OPEN_MPI, **TORCH, "TORCHELASTIC_RUN_ID": "7"}, ("a:29500", 2, 1, (1,))),
        ({**LAUNCH, **SLURM, "JAX_COORDINATOR_ADDRESS": "z:9"}, ("127.0.0.1:5", 4, 3, None)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_hnp_uri": ""}, None),
        ({**LAUNCH, "PMI_SIZE": "3", "PMI_RANK": "2"}, ("127.0.0.1:5", 4, 3, None)),
        ({**SLURM, "PMI_SIZE": "10", "PMI_RANK": "9"}, ("node007:61441", 10, 9, (1,))),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", **TORCH}, ("a:29500", 2, 1, (1,))),
        ({"PMIX_RANK": "0", "PMI_SIZE": "1"}, None),
        ({**HYDRA, "JAX_COORDINATOR_ADDRESS": "z:9"}, ("z:9", 4, 3, (1,))),
        ({**SLURM, **HYDRA}, (None, 4, 3, (1,))),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, (None, 4, 3, None)),
        ({**TRAINER, "TF_CONFIG": "{}"}, ("t-node-0-0.t:29500", 4, 2, None)),
        (JAX_JOB, ("t-worker-0:6666", 4, 2, None)),
        ({**SLURM, "JAXCOLL_COORDINATOR": "c:7", "JAX_COORDINATOR_ADDRESS": "z:9"}, ("c:7", 10, 9, (1,))),
        # Slurm's GPUs: one or two for each task, or all for all tasks of a host; uneven tasks
        (gpus("2", 4, tasks="3,1", node="x"), ("x:61441", 10, 9, None)),
        (gpus("0", 1, tasks="3,1", node="y", local="0"), ("x:61441", 10, 9, None)),
        (gpus("2,3", 4), ("node007:61441", 10, 9, None)),
        (gpus("0,1", 2), ("node007:61441", 10, 9, (1,))),
        (gpus("0,1,2,3", 4), ("node007:61441", 10, 9, (2, 3))),
        (gpus("0,1", 2, tasks="2,1", node="x"), ("x:61441", 10, 9, (1,))),
        (gpus("0,1", 2, tasks="2,1", node="y", local="0"), ("x:61441", 10, 9, None)),
        ({**TORCH, "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "5"}, ("a:29500", 2, 1, None)),
    ]  # fmt: skip


def test_first_launcher_wins():
    for environment, expected in PLACES:
        member = read_member(environment)
        if expected is None:
            assert member is None, environment
        else:
            member.check()
            place = Member(*expected, member.source)
            assert dataclasses.replace(member, job="", elsewhere=()) == place, environment


def test_launcher_names_the_job():
    for environment, job in (
        ({**SLURM, "SLURM_STEP_ID": "2"}, "Slurm step 4097.2"),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a-7@1"}, "prterun-a-7@1"),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "7"}, "torchrun 7"),
        (TORCH, ""),
        (LAUNCH, ""),
    ):
        assert read_member(environment).job == job


def test_slurm_task_0_is_anywhere():
    part = {**SLURM, "SLURM_STEP_NODELIST": "x[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    for way in ({"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_HET_SIZE": "2"}):
        zero = read_member({**part, **way, "SLURMD_NODENAME": "x2", "SLURM_PROCID": "0"})
        other = read_member({**part, **way, "SLURMD_NODENAME": "x1"})
        assert (zero.coordinator_address, zero.elsewhere) == ("x2:61441", ())
        assert (other.coordinator_address, other.elsewhere) == ("x1:61441", ("x2:61441",))
    assert read_member({**part, "SLURM_DISTRIBUTION": "cyclic"}).elsewhere == ()


IMPOSSIBLE = [
        ({"TF_CONFIG": "{'worker'"}, "TF_CONFIG is not JSON .*; it begins with \"{'worker'\""),
        ({"TF_CONFIG": "[1]"}, "its value must be a JSON object"),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "a 'task' but no 'cluster', which maps jobs"),
        (tf({"worker": "a:1"}, "worker", 0), "job 'worker' must be a list of addresses; got 'a:1'"),
        (tf({"worker": {"0": "a:1", "2": "c:1"}}, "worker", 0), r"without gaps; got \[0, 2\]"),
        (tf(WORKERS, "worker", -1), "this is task -1 of job 'worker'"),
        (tf(WORKERS), "does not say which task this process is: 'type' is missing"),
        (tf(WORKERS, "worker"), "'index' is missing from 'task'"),
        (tf(WORKERS, "worker", True), "a task's number must be a whole number from 0; got True"),
        (tf({"worker": ["a:0", "b:0"]}, "worker", 1), "a port that all processes know; 0, as in 'a:0' from TF_CONFIG"),
        (tf(WORKERS, "worker", "one"), "a task's number must be a whole number from 0; got 'one'"),
        (tf({**WORKERS, "master": ["p:1"]}, "worker", 0), "jobs are chief, worker, ps, evaluator; got master"),
        (tf({"chief": ["a:1"], "worker": ["a:1"]}, "chief", 0), "two tasks have the address a:1"),
        (tf({"worker": ["a", "b"]}, "worker", 0), "an address must be 'host:port'.* got 'a'. It came from TF_CONFIG"),
        (tf({"worker": ["a:1", "b:1"]}, "worker", 9), "TF_CONFIG: this is task 9 of .*, which has only 2"),
        (tf({"worker": ["a:1", "b:1"]}, "chief", 0), "a task of job 'chief', but the cluster has only the"),
        (tf({"ps": ["p:1"], "worker": ["w:1"]}, "ps", 0), "TF_CONFIG has parameter servers"),
        (tf({"chief": ["a:1", "b:1"]}, "chief", 0), "there can be only one chief; got a:1, b:1"),
        (tf(["a:1"], "worker", 0), "'cluster' must be a JSON object"),
        ({**LAUNCH, "JAXCOLL_PROCESSES": ""}, "jaxcoll launch: the environment variable JAXCOLL_PROCESSES is missing"),
        ({**SLURM, "SLURM_PROCID": "10"}, r"Slurm gave process 10 of 10"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "Slurm: SLURM_NTASKS must be a whole number; got 'many'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[1-"}, "this is not a list of hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[3-1]"}, r"not a range of hosts: \[3-1\]"),
        ({k: v for k, v in TORCH.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is missing"),
    ]  # fmt: skip


@pytest.mark.tensorflow("K22")
def test_impossible_variables_are_refused():
    for environment, message in IMPOSSIBLE:
        with pytest.raises(ValueError, match=message):
            read_member(environment).check()


def test_unsupported_launchers_are_refused():
    for name in (*launchers._OTHER_RANKS, *launchers._OTHER_SIZES):
        for around in ({}, SLURM):
            with pytest.raises(ValueError, match=f"{name}=3 says .* jaxcoll does not support"):
                read_member({**around, name: "3"})


def test_bad_addresses_are_refused():
    for address in ("a", "a:", ":1", "a:b", "a:99999", "::1:1", "[::1:1", 5):
        with pytest.raises(ValueError, match="an address must be 'host:port'"):
            host_and_port(address)


def test_slurm_lists_are_expanded():
    assert parse_hosts("a[08-10]b,c") == ["a08b", "a09b", "a10b", "c"]
    assert parse_counts("2(x2),1") == [2, 2, 1]
    with pytest.raises(ValueError, match="not a list of task counts: 'x'"):
        parse_counts("x")
