"""Some rows of the campaign of faults (tests/processes/campaign.py runs them all)."""

import re
import socket
import threading
from pathlib import Path

import forks
import pytest
from processes.campaign import STEP, Ran
from processes.campaign_faults import FAULTS

from jaxcoll._job import coordinator_proxy

pytestmark = pytest.mark.processes

IN_CI = (
    "SIGKILL of two at once, where steps have no deadline",
    "SIGSTOP of the one that writes a checkpoint, continued later",
    "SIGKILL of the one that writes a checkpoint",
    "death of the coordinator",
    "one drifts apart and another dies",
    "one worker differs in its rows",
)


@pytest.mark.parametrize("name", IN_CI)
def test_fault_ends_as_row_says(name, tmp_path):
    (fault,) = [f for f in FAULTS if f.name == name]
    ran = Ran(fault, tmp_path, started=forks.running)
    wrong = ran.wrong()
    assert not wrong, "\n".join(wrong)
    # The bounds of the row, and the time that a machine that does something else may take more.
    noticed, next_step = ran.times()
    assert not noticed > fault.within + 20
    assert not next_step > fault.within + STEP + 30


def test_page_shows_campaigns_rows():
    page = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text("utf8")
    shown = re.search(r"\| fault .*\n\| ---.*\n((?:\|.*\n)+)", page)[1].splitlines()
    rows = {(fault.name, str(fault.processes)) for fault in FAULTS}
    assert len(rows) == len(FAULTS) >= 30
    assert {tuple(line[2:].split(" | ")[:2]) for line in shown} < rows


@pytest.mark.parametrize("listened", [True, False])
def test_relay_outlives_coordinator_for_listeners(listened):
    heard = threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as coordinator,
        socket.socket(socket.AF_UNIX) as client,
    ):
        one = coordinator_proxy.CoordinatorProxy(f"127.0.0.1:{coordinator.getsockname()[1]}", 100.0)
        kind, _, name = one.address.partition(":")
        client.connect("\0" * (kind == "unix-abstract") + name)
        far, _ = coordinator.accept()
        for here, there in ((client, far), (far, client)):
            here.sendall(b"ping")
            assert there.recv(10) == b"ping"
        one.callbacks += [heard.set] * listened
        coordinator.close()
        far.close()
        if listened:
            assert heard.wait(5)
            check_silent(client)
        else:
            client.settimeout(2.0)
            assert client.recv(1) == b""


def check_silent(client):
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_relay_closes_nothing_by_itself():
    one = coordinator_proxy.CoordinatorProxy("127.0.0.1:1", 100.0)
    (client, near), (far, coordinator) = socket.socketpair(), socket.socketpair()
    with client, near, far:
        coordinator.close()
        client.sendall(b"ping")
        one._copy_out(near, far)  # JAX would end the process if its connection broke here
        check_silent(client)
