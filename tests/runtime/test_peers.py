"""The table of peers: who is there, silent, or has ended, by records and the coordinator's news."""

import dataclasses
import time

import pytest

from jaxcoll._job import liveness
from jaxcoll._job.key_value import CoordinatorClient, LocalKeys
from jaxcoll._runtime import peers
from jaxcoll._runtime.peers import Peers


@pytest.fixture
def start():
    """Starts one process of a run; `reported` if the coordinator would report its end."""
    keys, started, connection = LocalKeys(processes=3), [], liveness.coordinator_connection()

    def start(process, reported=True):
        if not reported:  # as in a process that was started again
            liveness.use_connection(None)
        one = Peers(CoordinatorClient(dataclasses.replace(keys, process=process)))
        one.runs.add("run")
        one.publish()
        liveness.use_connection(connection)
        started.append(one)
        return one

    yield start
    for one in started:
        one.store.close()


def judge(seen, *names):
    seen.observe()
    return [seen.has_left(name, "run") for name in names]


def test_predecessors_end_is_its_own(coordinator, start):
    seen, old, other = start(0), start(1), start(2)
    assert judge(seen, old.name, other.name) == [False, False]
    coordinator.sendall(b'{"ended": 1}\n')
    assert judge(seen, old.name, other.name) == [True, False]
    new = start(1, reported=False)
    assert judge(seen, old.name, new.name, other.name) == [True, False, False]
    old.publish()  # which was cut off, and comes back
    assert judge(seen, old.name, new.name) == [True, False]
    assert peers.parse_rank(old.name) == peers.parse_rank(new.name) == 1


def test_process_leaves_one_run(coordinator, start):
    seen, other = start(0), start(1)
    other.runs = {"another"}
    other.publish()
    assert judge(seen, other.name) == [True]
    assert not seen.has_left(other.name, "another")


def test_unreported_silence_is_an_end(coordinator, start, monkeypatch):
    monkeypatch.setattr(peers, "SILENT_WORKER_SECONDS", 0.0)
    seen, reported, unreported = start(0), start(1), start(2, reported=False)
    names = reported.name, unreported.name
    seen.observe()
    time.sleep(0.01)
    assert judge(seen, *names) == [False, True]
    assert all(map(seen.is_silent, names))  # so neither is taken in
    assert all(seen.is_settled(name, "run") for name in names)
    connection = liveness.coordinator_connection()
    liveness.use_connection(None)  # to a process that was started again nobody tells anything
    assert judge(seen, *names) == [True, True]
    liveness.use_connection(connection)
    coordinator.sendall(b'{"ended": 1}\n')
    assert judge(seen, *names) == [True, True]
