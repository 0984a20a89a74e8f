"""Which processes share a host: from what each publishes, the same to all."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxcoll._job import hosts
from jaxcoll._job.hosts import HOST, _place, hosts_of_job, publish_host
from jaxcoll._job.key_value import LocalKeys


class Keys(LocalKeys):
    def shares_client(self, other):
        return self is other


@pytest.fixture
def job(monkeypatch):
    """Acts as any of four processes, each of which has read nothing yet."""
    first, lock = LocalKeys(0, 4), threading.Lock()

    def act(process, function, name="a"):
        with lock:
            keys = Keys(process, 4, first._held, first._changed)
            monkeypatch.setenv(HOST, name)
            monkeypatch.setattr(hosts, "store", lambda: keys)
            monkeypatch.setattr(hosts, "_known", None)
            return function()

    return act


def test_process_alone_has_no_others(monkeypatch):
    monkeypatch.setattr(hosts, "_known", None)
    assert hosts_of_job() == (0,)
    monkeypatch.setattr(hosts, "store", lambda: Keys(0, 1))
    assert hosts_of_job() == (0,)


def test_same_name_is_same_host(job, monkeypatch):
    for process, name in enumerate("abab"):
        job(process, publish_host, name)
    assert [job(process, hosts_of_job) for process in range(4)] == [(0, 1, 0, 1)] * 4
    job(1, publish_host, "c")  # it was started again elsewhere
    assert job(1, hosts_of_job) == (0, 1, 0, 1)
    monkeypatch.setattr(hosts, "store", lambda: None)
    assert hosts_of_job() == (0, 1, 0, 1), "what was agreed outlives the coordinator"


def test_first_to_give_up_decides(job, monkeypatch):
    monkeypatch.setattr(hosts, "HOSTS_SECONDS", 0.05)
    for process, name in ((0, "a"), (1, "b"), (3, "d")):
        job(process, publish_host, name)
    unknown = (0, 0, 0, 0)
    assert job(3, hosts_of_job) == unknown
    job(2, publish_host, "c")
    assert [job(process, hosts_of_job) for process in range(4)] == [unknown] * 4


def test_first_use_awaits_unpublished_hosts(job, monkeypatch):
    keys = Keys(0, 2)
    monkeypatch.setenv(HOST, "a")
    monkeypatch.setattr(hosts, "store", lambda: keys)
    monkeypatch.setattr(hosts, "_known", None)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(hosts_of_job)
        mine = keys.get("jaxcoll/hosts/0", 10)
        assert not found.done()
        keys.set("jaxcoll/hosts/1", mine)
        assert found.result(10) == (0, 0)


def test_host_is_name_boot_network(monkeypatch, tmp_path):
    monkeypatch.delenv(HOST, raising=False)
    here = _place()
    assert here == _place()
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "another")
    assert _place().partition(" ")[0] == "another"
    assert _place().partition(" ")[2] == here.partition(" ")[2]
    if hosts._NETWORK.is_symlink():
        before = _place()
        other_network = tmp_path / "net"
        other_network.symlink_to("net:[1]")
        monkeypatch.setattr(hosts, "_NETWORK", other_network)
        assert _place() != before
    monkeypatch.setattr(hosts, "_BOOT", Path("/not/there"))
    assert _place().split() == ["another", "another"]
    monkeypatch.setenv(HOST, "rack 7")
    assert _place() == "rack 7"
