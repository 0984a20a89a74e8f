"""What the doctor finds in the facts of processes."""

from jaxcoll.cli import doctor

WELL = {
    "versions": {"jax": "1"}, "host": "a", "platform": "cpu", "kind": "cpu", "devices": 1,
    "collectives": "gloo", "malloc": [], "processes": 2, "keeps_memory": True, "files": 4096,
    "shared": 1 << 34, "cores": [8, 16],
}  # fmt: skip


def levels(findings):
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in findings)
    return {finding.what: finding.level for finding in findings if finding.level != "ok"}


def test_machine_findings():
    for change, expected in (
        ({}, {}),
        ({"keeps_memory": False}, {"malloc": "warn"}),
        ({"keeps_memory": False, "malloc": ["MALLOC_TOP_PAD_"]}, {"malloc": "warn"}),
        ({"keeps_memory": False, "processes": 1}, {}),
        ({"keeps_memory": False, "platform": "gpu"}, {}),
        ({"collectives": "None"}, {"collectives": "bad"}),
        ({"files": 256}, {"open files": "warn"}),
        ({"files": -1, "shared": None}, {}),
        ({"cores": [1, 16]}, {"cores": "warn"}),
        ({"cores": [1, 16], "processes": 1}, {}),
        ({"cores": [1, 1]}, {}),
        ({"collectives": "mpi"}, {"deadlines": "warn"}),
        ({"shared": 1 << 26}, {"shared memory": "warn"}),
    ):
        assert levels(list(doctor.machine_findings({**WELL, **change}))) == expected, change


def test_differing_processes_are_found():
    for other, what, shown in (
        ({"versions": {"jax": "2"}}, "versions", "{jax: 1} on process 0; {jax: 2} on process 1"),
        ({"devices": 8}, "devices", "1 on process 0; 8 on process 1"),
        ({"kind": "H100"}, "kind", "cpu on process 0; H100 on process 1"),
    ):
        findings = list(doctor.job_findings([WELL, {**WELL, **other}]))
        assert levels(findings) == {f"{what} of each process": "bad"}
        (bad,) = (finding for finding in findings if finding.level == "bad")
        assert bad.found == shown
