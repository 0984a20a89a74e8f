"""Some rows of the campaign of faults (tests/processes/campaign.py runs them all)."""

import dataclasses
import socket
import threading

import pytest
from processes.campaign import FAULTS, run, seconds, wrong

from jaxcoll._host import relay

pytestmark = pytest.mark.processes

IN_CI = (
    "SIGKILL of two at once",
    "SIGSTOP, continued later",
    "too few are left",
    "started again and taken in",
    "death of the coordinator",
    "full disk at a checkpoint",
    "another rows on one",
)


@pytest.mark.parametrize("name", IN_CI)
def test_a_fault_ends_in_the_named_error_or_in_training_that_goes_on(name, tmp_path):
    (fault,) = [f for f in FAULTS if f.name == name]
    became, hit = run(dataclasses.replace(fault, spec={**fault.spec, "leaves": 3}), tmp_path)
    assert wrong(fault, became) == []
    assert {b.status for b in became if b.outcome == "trained"} <= {3}, "not what it left with"
    assert hit is None or seconds(fault, became, hit) < 60


def test_there_are_thirty_faults_of_names_that_differ():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("listened", [True, False])
def test_a_relay_stays_open_when_the_coordinator_dies_if_somebody_listens(listened):
    coordinator = socket.create_server(("127.0.0.1", 0))
    one = relay.Relay(f"127.0.0.1:{coordinator.getsockname()[1]}")
    client = socket.socket(socket.AF_UNIX)
    client.connect(one.address.removeprefix("unix:"))
    far, _ = coordinator.accept()
    client.sendall(b"ping")
    assert far.recv(10) == b"ping"
    far.sendall(b"pong")
    assert client.recv(10) == b"pong"
    heard = threading.Event()
    if listened:
        one.callbacks.append(heard.set)
    coordinator.close()
    far.close()
    client.settimeout(2.0)
    if listened:
        assert heard.wait(5)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
    else:
        assert client.recv(1) == b""
    client.close()
