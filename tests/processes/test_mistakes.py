"""What users do wrong in several processes at once: told in words, where it is wrong."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def test_mistakes_over_processes_are_named(
    launched,
):
    flags = ["-n", "2", "--keep-going", "--devices-per-process", "2", "--timeout-seconds", "120"]
    done = launched(*flags, Path(__file__).with_name("mistakes.py"))
    lines = done.stdout.splitlines()
    different = "ProgramMismatchError: Processes are about to run different programs"
    for rank, other in ((0, "1"), (1, "0")):
        found = dict(
            line.removeprefix(f"[{rank}] ").split(": ", 1)
            for line in lines
            if line.startswith(f"[{rank}] ") and ": " in line
        )
        assert "have different numbers of devices" in found["uneven"], lines
        assert f"all devices of the mesh belong to process {other}" in found["other's"]
        assert found["order"].startswith(different)
        assert (
            "process 0: devices 0 1 2048 2049; process 1: devices 2049 2048 1 0" in found["order"]
        )
        assert found["name"].startswith(different)
        assert "process 1: program `batch_reduce`" in found["name"]
    left = [line for line in lines if line.startswith("[0] left: PeerLostError")]
    assert left, lines
    assert "process 1 has ended" in left[0], left
    assert "process 0 of 2 ended with status 3." in done.stderr, done.stderr


def test_every_entry_keeps_promises(launched, tmp_path):
    flags = ["-n", "2", "--timeout-seconds", "120"]
    done = launched(*flags, Path(__file__).with_name("entries.py"), tmp_path / "last.npz")
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    for rank in range(2):
        for entry in ("call", "elastic", "diloco", "elastic_diloco"):
            assert lines[f"[{rank}] {entry} own"] == " ran", done
            assert lines[f"[{rank}] {entry} same"] == "SameRowsWarning ran", done
        for entry in ("call", "elastic"):
            found = lines[f"[{rank}] {entry} program"]
            assert found.startswith(" ProgramMismatchError: Processes are about to run"), done
            assert "process 1: line " in found
    assert "All workers end." in lines["[0] elastic program"]
    assert lines["[0] elastic failure"] == " ran", done
    assert "no such row" in lines["[1] elastic failure"]
    assert lines["[0] changes"].endswith("; worker 1 ended")
