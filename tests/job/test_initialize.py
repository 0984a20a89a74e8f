"""Entering a job: who arrives, who does not, and what each is told."""

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import threading
import time
import types
from unittest import mock

import jax
import numpy as np
import pytest
from at_once import at_once

import jaxcoll as jc
from jaxcoll._job import coordinator_process, initialize
from jaxcoll._job.coordinator import listen_at, start_coordinator
from jaxcoll._job.coordinator_process import LONGEST
from jaxcoll._job.liveness import CoordinatorConnection
from jaxcoll._job.specs import Member, host_and_port
from jaxcoll._job.startup import arrive
from jaxcoll.errors import DeadlineExceededError, PeerLostError

TIMES = {"heartbeat_timeout_seconds": 1, "shutdown_timeout_seconds": 1}
NO_COORDINATOR = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.fixture
def coordinator():
    started = []

    def start(processes):
        started.append(start_coordinator("127.0.0.1:0", processes))
        return started[-1]

    yield start
    for each in started:
        each.close()


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def answering(reply, after=0.0):
    """The address of a server that replies so to its first connection, and then hangs up."""

    def answer():
        connection, _ = server.accept()
        server.close()
        with connection:
            connection.recv(LONGEST)
            time.sleep(after)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        yield address_of(server)
        thread.join()


def check_refused(kind, words, address, rank=1, n=2, seconds=20, **more):
    with pytest.raises(kind, match=words) as caught:
        arrive(Member(address, n, rank, **more), seconds)
    return caught.value


@pytest.mark.parametrize(
    ("present", "expected", "kind", "message"),
    [
        ([(0, 3), (1, 3), (1, 3)], 3, ValueError, "two processes claim to be process 1 of 3: .*:"),
        ([(0, 2), (1, 3)], 2, ValueError, "expects 3 processes, but the coordinator expects 2"),
    ],
)  # fmt: skip
def test_contradictions_are_told_to_all(coordinator, present, expected, kind, message):
    address = coordinator(expected).address
    at_once(*(lambda m=m: check_refused(kind, message, address, *m, 60) for m in present))


def test_other_jobs_process_is_refused(coordinator):
    address, words = coordinator(2).address, "process 1 of 2 did not.*This is Slurm step 7.0; process 1 of a job without a name"  # fmt: skip
    first = {"rank": 0, "seconds": 3, "job": "Slurm step 7.0"}

    def others():
        time.sleep(0.5)
        for job in ("Slurm step 8.0", ""):
            words = f"serves Slurm step 7.0, and process 1 of {job or 'a job without'}"
            check_refused(ValueError, words, address, job=job)

    at_once(lambda: check_refused(DeadlineExceededError, words, address, **first), others)


def test_process_0_is_found_anywhere(coordinator):
    address = coordinator(2).address
    with answering(NO_COORDINATOR) as other, socket.socket() as nothing:
        nothing.bind(("127.0.0.1", 0))
        member = Member(other, 2, 1, elsewhere=(address_of(nothing), address))
        both = at_once(lambda: arrive(member, 20), lambda: arrive(Member(address, 2, 0), 20))
    assert len({one.getpeername() for one in both}) == 1
    for one in both:
        one.close()


def test_process_0_hears_refusal_last(monkeypatch):
    recipients = []
    monkeypatch.setattr(coordinator_process, "_send", lambda _, to: recipients.extend(to))
    monkeypatch.setattr("os._exit", lambda _: None)
    refusing = object.__new__(coordinator_process._Coordinator)
    refusing._members = {"zero": 0, "one": 1}
    refusing._received = dict.fromkeys(("zero", "one", "no line yet"), b"")
    refusing._listener = types.SimpleNamespace(fileno=lambda: -1)
    refusing._refuse({})
    assert recipients == ["one", "no line yet", "zero"]


@pytest.mark.tensorflow("G41")
def test_early_death_is_named(coordinator):
    address, start = coordinator(3).address, time.monotonic()
    hello = {"process_id": 2, "num_processes": 3, "patience": 60.0, "who": "there:1", "job": ""}
    with socket.create_connection(host_and_port(address)) as dying:
        dying.sendall(json.dumps(hello).encode() + b"\n")
        threading.Timer(0.2, lambda: dying.shutdown(socket.SHUT_RDWR)).start()
        words = r"process 2 \(there:1\) ended before all 3 had arrived"
        assert check_refused(PeerLostError, words, address, 0, 3, 30).ranks == (2,)
    assert time.monotonic() - start < 10


def test_unneeded_coordinator_ends(coordinator):
    started = coordinator(2)
    arrived = at_once(*(lambda r=r: arrive(Member(started.address, 2, r), 20) for r in range(2)))
    words = "is not a coordinator that waits for processes: another"
    check_refused(ValueError, words, started.address)  # the job has begun
    os.close(os.dup(started.lifeline))
    arrived[0].close()
    assert started.process.poll() is None
    os.dup2(os.open(os.devnull, os.O_RDONLY), started.lifeline)  # as if this process had ended
    arrived[1].close()
    assert started.process.wait(20) == 0


def test_news_after_go_is_kept():
    with answering(b'{"go": true}\n{"ended": 0}\n') as address:
        connection = CoordinatorConnection(arrive(Member(address, 2, 1), 5).detach())
    assert connection.news() == {0: {"ended": 0, "stage": None}}
    connection.close()


def test_unreachable_coordinators_are_explained(monkeypatch):
    late = b'{"error": "process 1 is late", "kind": "deadline"}\n'
    with answering(late, after=1.2) as slow:
        check_refused(DeadlineExceededError, "of 2: process 1 is late", slow, seconds=0.5)
    with answering(NO_COORDINATOR) as other:
        words = f"whatever answers at {other} is not a coordinator"
        check_refused(ValueError, words, other, seconds=5)
    nowhere = "no-such-host.invalid:1"
    words = f"'{nowhere}' cannot be resolved here .*came from the arguments"
    check_refused(ValueError, words, nowhere, seconds=5)
    monkeypatch.setattr("jaxcoll._job.startup.ARRIVAL_REPLY_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = f"{address_of(silent)} did not answer in time"
        check_refused(DeadlineExceededError, words, address_of(silent), seconds=0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = address_of(taken)
        words = rf"could not reach the coordinator at {address} within 0.2 s \(Conn.*Is process 0"
        check_refused(DeadlineExceededError, words, address, seconds=0.2)
        taken.listen()
        for kind, at, words in (
            (OSError, address, f"The coordinator cannot listen at {address}.*: Address already in use. Choose a free"),
            (ValueError, nowhere, "'no-such-host.invalid', where the coordinator should listen, has no addr"),
        ):  # fmt: skip
            with pytest.raises(kind, match=words):
                listen_at(at, Member(at, 2, 0), **TIMES)


def test_missing_address_is_refused(monkeypatch):
    unknown = mock.Mock(side_effect=ValueError("coordinator_address should be defined."))
    monkeypatch.setattr(jax.distributed, "initialize", unknown)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(ValueError, match="Open MPI does not say where .* JAX_COORDINATOR_ADDRESS"):
        jc.initialize()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ValueError, {"initialization_timeout_seconds": float("inf")}, "`initialization_timeout_seconds` to be a finite number of seconds"),
        (ValueError, {"heartbeat_timeout_seconds": -1}, "`heartbeat_timeout_seconds` to be a finite number of seconds"),
        (ValueError, {"num_processes": 2}, "needs `coordinator_address` and `process_id`, which"),
        (ValueError, {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, "process 2 of 2"),
        (ValueError, {"coordinator_address": "a", "num_processes": 2, "process_id": 0}, "'host:port'"),
        (ValueError, {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0, "local_device_ids": "01"},
         "`local_device_ids` must be an integer"),
        (ValueError, {"cluster_resolver": "slurm"}, "`cluster_resolver` must be a ClusterResolver"),
        (RuntimeError, {"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 0},
         "must come before anything that uses devices"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(kind, arguments, message):
    jax.devices()
    with pytest.raises(kind, match=message):
        jc.initialize(**arguments)


def test_unlaunched_process_is_alone():
    jc.initialize()
    assert jax.process_count() == 1
    assert not jax.distributed.is_initialized()


@pytest.fixture
def arrivals(monkeypatch):
    """The members that come to a coordinator, where time is up at once."""
    monkeypatch.setattr(initialize, "_check_unused", lambda: None)
    monkeypatch.setattr(initialize, "_keep_memory", lambda: None)
    late = mock.Mock(side_effect=DeadlineExceededError("time is up"))
    monkeypatch.setattr(initialize, "arrive", late)
    return late


def test_arguments_and_variables_combine(arrivals, monkeypatch):
    numbers = {"num_processes": np.int64(3), "process_id": np.int32(2)}
    for arguments, variables in (
        ({**numbers, "local_device_ids": np.int64(1)}, {}),
        ({}, {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(DeadlineExceededError):
            jc.initialize("127.0.0.1:1", **arguments)
        (member, _), _ = arrivals.call_args
        assert dataclasses.replace(member, source="") == Member("127.0.0.1:1", 3, 2, (1,), "")


def test_loopback_name_is_explained(arrivals, monkeypatch):
    loopback = ipaddress.ip_address("127.0.0.1")
    monkeypatch.setattr("jaxcoll._job.coordinator._resolve", lambda *_: loopback)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DeadlineExceededError) as caught:
        jc.initialize(f"node1:{port}", 2, 0)
    assert f"'node1:{port}' resolves to 127.0.0.1:{port} on" in caught.value.__notes__[0]


def test_second_call_makes_no_devices(monkeypatch):
    here = types.SimpleNamespace(member=Member("127.0.0.1:1", 2, 0))
    monkeypatch.setattr(initialize, "_joined", here)
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.process_count", lambda: pytest.fail("it makes devices"))
    jc.initialize("127.0.0.1:1", 2, 0)
    words = "this is already process 0 of 2, and cannot also become"
    with pytest.raises(RuntimeError, match=words):
        jc.initialize("127.0.0.1:1", 2, 1)


TWO_JOBS = {"ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1", "w2:1"]}


def tf_config(cluster, kind=None, index=None, **arguments):
    task = {} if kind is None else {"type": kind, "index": index}
    env = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "rpc_layer": "grpc"})}
    return jc.distribute.TFConfigClusterResolver(environment=env, **arguments)


@pytest.mark.tensorflow("K14", "K16", "K17", "K19", "K20")
def test_tf_config_resolver_reads_arguments():
    resolver = tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 0, task_id=1)
    assert resolver.cluster_spec() == {"chief": ("a:1",), "worker": ("b:1", "c:1")}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "grpc://c:1")
    assert resolver.master("chief", 0, rpc_layer="x") == "x://a:1"
    assert resolver.num_accelerators() == {}
    assert resolver.member() == Member("a:1", 3, 2, None, "TFConfigClusterResolver")
    counted = tf_config({"worker": ["a:1", "b:1"]}, "worker", 0, task_id=np.int64(1))
    assert type(counted.task_id) is int, "as any count of NumPy's"
    with pytest.raises(ValueError, match="^`task_id`: a task's number must be a wh.* got 1.5"):
        tf_config({"worker": ["a:1", "b:1"]}, "worker", 0, task_id=1.5)
    typed = tf_config(TWO_JOBS, 123456, "1")
    assert (typed.task_type, typed.task_id) == ("123456", 1)
    one = {"worker": ["a:1"]}
    alone = jc.distribute.TFConfigClusterResolver(environment={})
    for resolver in (alone, tf_config({}), tf_config(one), tf_config(one, "worker", 0)):
        assert resolver.master() == "", "there is nobody else to connect to"
    with pytest.raises(ValueError, match="there is no task 7 of job 'worker'; the cluster has"):
        typed.master("worker", 7)


@pytest.mark.parametrize(
    ("jobs", "change", "message"),
    [
        ({"worker": 3}, {}, "`jobs` has 3 tasks, but the Slurm step has 4"),
        (None, {"SLURM_PROCID": ""}, "SLURM_PROCID is missing .* Start it with `srun`"),
        (None, {"SLURM_STEP_TASKS_PER_NODE": "2"}, r"2 hosts \(n\[1-2\]\), but the tasks of 1"),
    ],
)
def test_slurm_resolver_refuses(jobs, change, message):
    env = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0"}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        jc.distribute.SlurmClusterResolver(jobs, environment={**env, **change})


@pytest.mark.parametrize("per_node", [None, "3,1", "2(x2)"])
def test_tasks_per_node_override_slurm(per_node):
    env = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "3"}
    env |= {} if per_node is None else {"SLURM_STEP_TASKS_PER_NODE": per_node}
    resolver = jc.distribute.SlurmClusterResolver(tasks_per_node=2, environment=env)
    assert resolver.cluster_spec() == {"worker": ("n1:8888", "n1:8889", "n2:8888", "n2:8889")}
    assert resolver.master() == "grpc://n2:8889"
    assert resolver.member() == Member("n1:8888", 4, 3, None, "SlurmClusterResolver")
    step = jc.distribute.SlurmClusterResolver(environment={
        **env, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"
    })  # fmt: skip
    assert step.member().job == "Slurm step 7.2"
