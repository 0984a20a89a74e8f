"""Two hosts, and a cable between them that is pulled."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from at_once import wait_for
from processes.hosts import hosts, listening, pids, pull_cable

import jaxcoll as jc
from jaxcoll._job.launch.subprocesses import killed_on_exit

pytestmark = pytest.mark.processes
JOB = Path(__file__).with_name("cut_job.py")


def test_coordinators_side_goes_on(tmp_path):
    logs, saved = [tmp_path / f"{rank}.log" for rank in range(2)], tmp_path / "last.npz"
    with hosts(2) as two, killed_on_exit() as running:
        for rank, log in enumerate(logs):
            arguments = [str(rank), "2", f"{two.address(0)}:9123", str(saved)]
            command = [*two.on(rank), sys.executable, str(JOB), *arguments]
            alone = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
            with log.open("wb") as out:
                running.start(command, alone, stdout=out, stderr=subprocess.STDOUT)
        said = lambda: "\n".join(log.read_text() for log in logs)
        wait_for(lambda: all("TRAINING" in log.read_text() for log in logs), 100, said)
        for host in range(2):
            own = {two.address(host), "127.0.0.1"}
            assert listening(two, host) <= own, "its own address, and no other"
        pull_cable(two, 1)
        wait_for(
            lambda: all(process.poll() is not None for process in running.processes), 100, said
        )
        # The coordinator cannot see the process beyond a cut end, and leaves all the same.
        wait_for(lambda: not pids(two, 0), 100, said)
    texts = [log.read_text() for log in logs]
    assert [process.returncode for process in running.processes] == [0, 0], "\n".join(texts)
    found = [json.loads(text.partition("RESULT ")[2].splitlines()[0]) for text in texts]
    here, cut = found
    assert [change[:2] for change in here["changes"]] == [[[0], [1]]]
    assert here["finished"] == 60
    assert "is cut off from this worker" in cut["error"]
    assert cut["finished"] < 40
    # Its own, or a later one of the others, whichever came first: the newest stays in the end.
    assert (
        int(re.search(r"The state after step (\d+) is saved", cut["error"])[1]) >= cut["finished"]
    )
    assert jc.restore_checkpoint(saved, np.float32(0))[1] == 60
