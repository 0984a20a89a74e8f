"""What the doctor finds in the facts of processes."""

import jax
import pytest

from jaxcoll.cli import doctor
from jaxcoll.cli.diagnosis import job_findings, machine_facts, machine_findings, pair_findings

WELL = {
    "system": "Linux", "host": "a", "address": "10.0.0.1", "pid": 1, "versions": {"jax": "1"},
    "platform": "cpu", "kind": "cpu", "devices": 1, "collectives": "gloo", "malloc": [],
    "processes": 2, "keeps_memory": True, "glibc": True, "files": 4096, "shared": 1 << 34, "cores": 2,
}  # fmt: skip


def levels(findings):
    return {finding.what: finding.level for finding in findings if finding.level != "ok"}


@pytest.mark.parametrize(
    ("change", "bandwidth", "expected"),
    [
        ({}, 1e9, {}),
        ({"keeps_memory": False}, 1e9, {"malloc": "warn"}),
        ({"keeps_memory": False, "malloc": ["MALLOC_TOP_PAD_"]}, 1e9, {"malloc": "warn"}),
        ({"keeps_memory": False, "processes": 1}, 1e9, {}),
        ({"keeps_memory": False, "platform": "gpu"}, 1e9, {}),
        ({"keeps_memory": False, "glibc": False}, 1e9, {}),
        ({"collectives": "None"}, 1e9, {"collectives": "bad"}),
        ({"files": 256}, 1e9, {"open files": "warn"}),
        ({"shared": 1 << 26}, 1e9, {"shared memory": "warn"}),
        ({"address": None}, 1e9, {"this host's name": "warn"}),
        ({"system": "Windows", "files": -1}, 1e9, {"system": "warn"}),
        ({"system": "Darwin"}, 1e9, {"system": "warn"}),
        ({}, 1e7, {"loopback": "warn"}),
        ({}, None, {"loopback": "bad"}),
    ],
)
def test_a_machine(change, bandwidth, expected):
    findings = machine_findings({**WELL, **change}, bandwidth)
    assert levels(findings) == expected
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in findings)


@pytest.mark.parametrize(
    ("other", "what", "words"),
    [
        ({"versions": {"jax": "2"}}, "version of jax", "1 on process 0; 2 on process 1"),
        ({"devices": 8}, "devices of each process", "1 on process 0; 8 on process 1"),
        ({"kind": "H100"}, "kind of device", "cpu on process 0; H100 on process 1"),
        (None, "processes", "process 1 of 2 did not answer"),
    ],
)
def test_processes_that_differ(other, what, words):
    findings = job_findings([WELL, other and {**WELL, **other}], ["10.0.0.1", "10.0.0.2"])
    assert levels(findings) == {what: "bad"}
    (finding,) = (finding for finding in findings if finding.level == "bad")
    assert finding.found == words
    assert finding.fix


def test_a_slow_link_is_named():
    assert levels(pair_findings({(0, 1): 2e9, (1, 2): 1e9})) == {}
    (slow,) = pair_findings({(0, 1): 2e9, (1, 2): 1e8, (2, 0): 2e9})
    assert (slow.level, slow.found) == ("warn", "0.10 … 2.00 GB/s over 3 links; slow: 1 → 2")
    assert pair_findings({}) == []


def test_a_platform_without_a_plugin_is_an_error_in_words(monkeypatch):
    def none():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(RuntimeError, match="no device with JAX_PLATFORMS=cuda. Install"):
        machine_facts()


def test_a_process_that_dies_after_it_arrived_is_not_waited_for_longer_than_asked():
    class Store(dict):
        process, processes = 0, 2

        def set(self, key, value):
            self[key] = value

        def get(self, key, seconds):
            assert seconds <= 0.2
            if key not in self:
                raise TimeoutError
            return self[key]

    with pytest.raises(RuntimeError, match=r"process 1 of 2 did not answer within 0\.2 s after"):
        doctor._meet(Store(), 0.2)
