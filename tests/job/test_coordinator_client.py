"""A coordinator that does not reply holds up nobody for longer than was asked for."""

import threading

import pytest
from at_once import at_once

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job import key_value
from jaxcoll._job.key_value import CoordinatorClient, LocalKeys


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(key_value, "HEARTBEAT_SECONDS", 0.05)
    made = CoordinatorClient(LocalKeys())
    yield made
    made.close()


@pytest.fixture
def stopped():
    """What a request waits for that nobody replies to; it goes on after the test."""
    continued = threading.Event()
    yield lambda keys: continued.wait(20)
    continued.set()


def test_stopped_coordinators_request_times_out(client, stopped):
    with pytest.raises(
        StoreUnreachableError, match="is stopped or cut off: it did not answer within 0.05 s"
    ):
        client.request(stopped, 0.05)


def test_errors_reach_the_caller(client):
    with pytest.raises(ZeroDivisionError):
        client.request(lambda keys: 1 / 0, 5)


def test_silence_beyond_patience_is_loss(client, stopped):
    client.patience = 0.1
    with pytest.raises(StoreUnreachableError, match="did not answer within 0.1 s"):
        client.request(stopped)
    for read in (lambda: client.try_get("key"), lambda: client.get("key", 5), client.check):
        with pytest.raises(StoreUnreachableError, match="is dead, stopped or cut off"):
            read()


def test_loss_ends_all_waits(client, stopped):
    waiting = threading.Timer(0.1, client.lose)
    waiting.start()
    errors = at_once(*[lambda: client.request(stopped)] * 3)
    assert [type(error) for error in errors] == [StoreUnreachableError] * 3


def test_one_thread_makes_all_requests(client):
    (thread, *others) = set(
        at_once(*[lambda: client.request(lambda keys: threading.current_thread())] * 20)
    )
    assert not others
    client.close()
    with pytest.raises(StoreUnreachableError):
        client.all("folder")
    thread.join(5)
    assert not thread.is_alive()
