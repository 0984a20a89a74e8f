"""Processes that do not come to JAX's own meetings are named in time."""

import dataclasses
import json
import socket
import threading
import time

import pytest

import jaxcoll as jc
from jaxcoll._job import startup
from jaxcoll._job.key_value import LocalKeys
from jaxcoll._job.liveness import CoordinatorConnection

BOTH_DIED = b"""{"ended": 1, "stage": null}
{"ended": 2}
{"ended": 0, "stage": "left"}
"""


@pytest.fixture
def connection():
    here, coordinator = socket.socketpair()
    yield CoordinatorConnection(here.detach()), coordinator
    coordinator.close()


WAITS = {"connect": startup.connect_clients, "devices": startup.exchange_devices}


def waits(kind, connection, timeout):
    """Enter a meeting of this kind, in which nothing comes about before the end of the test."""
    comes = threading.Event()
    try:
        WAITS[kind](comes.wait, connection, timeout)
    finally:
        comes.set()


@pytest.mark.parametrize("kind", ["connect", "devices"])
@pytest.mark.parametrize(
    ("sent", "message", "ranks"),
    [
        (BOTH_DIED, "Processes 1, 2 ended during startup", (1, 2)),
        (b"the end", "The coordinator died, or was cut off, during startup", ()),
    ],
)
def test_ended_processes_end_the_wait(kind, sent, message, ranks, connection):
    connection, coordinator = connection
    if sent == b"the end":
        coordinator.close()
    else:
        coordinator.sendall(sent)
    with pytest.raises(jc.errors.PeerLostError, match=message) as caught:
        waits(kind, connection, 60)
    assert caught.value.ranks == ranks
    if ranks:  # who gives up because of another is not blamed by those who notice later
        assert coordinator.recv(1000) == b'{"stage": "left"}\n'


@pytest.mark.parametrize(
    ("kind", "message"),
    [("connect", "within 0.1 s: one is stopped"), ("devices", "within 0.1 s, th")],
)
def test_waits_end_in_time(kind, message, connection, monkeypatch):
    monkeypatch.setattr(startup, "LEAST_DEVICES_SECONDS", 0.1)
    with pytest.raises(jc.errors.DeadlineExceededError, match=message):
        waits(kind, connection[0], 0.1)


def test_later_ends_are_no_loss(connection):
    connection, coordinator = connection
    coordinator.sendall(b'{"ended": 1, "stage": "devices"}\n')
    assert startup.exchange_devices(lambda: time.sleep(0.1) or 7, connection, 60) == 7
    startup.connect_clients(lambda: time.sleep(0.1), connection, 60)
    reports = coordinator.recv(1000).splitlines()
    assert [json.loads(each)["stage"] for each in reports] == ["devices", "connected"]
    coordinator.sendall(b'{"ended": 2, "stage": "connected"}\n')
    startup.connect_clients(lambda: time.sleep(0.1), connection, 60)
    with pytest.raises(jc.errors.PeerLostError, match="Process 2 ended during"):
        waits("devices", connection, 60)


@pytest.mark.parametrize("kind", WAITS)
def test_errors_while_connecting_reach_caller(kind):
    with pytest.raises(ZeroDivisionError):
        WAITS[kind](lambda: 1 / 0, None, 5.0)


def test_late_devices_are_named(monkeypatch):
    keys, late = LocalKeys(0, 2), jc.errors.DeadlineExceededError
    monkeypatch.setattr(startup, "store", lambda: keys)
    with pytest.raises(late, match="Process 1 of 2 did not .* 0.1 s of the f"):
        startup.await_all(0.1, lambda: None)
    monkeypatch.setattr(startup, "store", lambda: dataclasses.replace(keys, process=1))
    with pytest.raises(late, match="after process 0 had stopped waiting for it"):
        startup.await_all(60, lambda: None)
    keys.delete("jaxcoll/devices_left")
    startup.await_all(0.1, lambda: None)
