"""What the coordinator tells of who has ended is heard, and told apart from silence."""

import socket
import time

import forks
import pytest

from jaxcoll._elastic import heartbeat
from jaxcoll._elastic.heartbeat import Heartbeats, name_worker
from jaxcoll._job import liveness


@pytest.fixture
def coordinator():
    here, there = socket.socketpair()
    connection = liveness.CoordinatorConnection(here.detach())
    liveness.use_connection(connection)
    yield there
    liveness.use_connection(None)
    connection.close()
    there.close()


def test_lines_are_heard_whole_however_they_arrive(coordinator):
    assert liveness.list_ended() == {}
    coordinator.sendall(b'{"go": true}\n{"ended": 2}\n{"ended": 1')
    assert liveness.list_ended() == {2: {}}
    coordinator.sendall(b'0, "done": {"0-1": 7}}\n')
    assert liveness.list_ended() == {2: {}, 10: {"0-1": 7}}
    coordinator.sendall(b'{"ended\n{"ended": 0}\n{"ended"')
    coordinator.close()
    assert liveness.list_ended() == liveness.list_ended() == {0: {}, 2: {}, 10: {"0-1": 7}}


def test_a_forked_child_does_not_keep_the_connection_of_its_parent(tmp_path):
    done = forks.with_jaxcoll().run(FORKS, cwd=tmp_path)
    assert done.stdout.split() == ["child", "closed", "parent", "open"]


FORKS = """
import os, socket
from jaxcoll._job import liveness

there, here = socket.socketpair()
connection = liveness.CoordinatorConnection(here.detach())
liveness.use_connection(connection)
child = os.fork()
if child:
    os.waitpid(child, 0)
try:
    os.fstat(connection.fd)
    found = "open"
except OSError:
    found = "closed"
print("parent" if child else "child", found, flush=True)
os._exit(0)
"""


def test_who_was_not_told_of_anybody_knows_of_nobody():
    assert liveness.list_ended() == {}
    assert liveness.coordinator_connection() is None


def test_worker_has_ended_and_its_successor_has_not(coordinator):
    old, other, connection = name_worker(1), name_worker(2), liveness.coordinator_connection()
    liveness.use_connection(None)  # as in a process that was started again
    new = name_worker(1)
    liveness.use_connection(connection)
    seen = Heartbeats()
    seen.observe(dict.fromkeys((old, new, other), "1"))
    assert not any(map(seen.has_ended, (old, new, other)))
    coordinator.sendall(b'{"ended": 1}\n')
    assert [seen.has_ended(name) for name in (old, new, other)] == [True, False, False]
    assert heartbeat.parse_rank(old) == heartbeat.parse_rank(new) == 1


def test_silent_worker_lives_while_its_connection_is_open(coordinator, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_WORKER_SECONDS", 0.0)
    reported, seen = name_worker(1), Heartbeats()
    connection = liveness.coordinator_connection()
    liveness.use_connection(None)
    unreported = name_worker(2)
    liveness.use_connection(connection)
    texts = dict.fromkeys((reported, unreported), "1")
    seen.observe(texts)
    time.sleep(0.01)
    seen.observe(texts)
    assert all(map(seen.is_silent, texts))  # so neither is taken in
    assert all(map(seen.is_settled, texts))
    assert [seen.has_ended(name) for name in texts] == [False, True]
    liveness.use_connection(None)  # to a worker that was started again nobody tells anything
    assert all(map(seen.has_ended, texts))
    liveness.use_connection(connection)
    coordinator.sendall(b'{"ended": 1}\n')
    assert all(map(seen.has_ended, texts))
