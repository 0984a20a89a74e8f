"""Generations of workers of which there is no end: every one makes its own connections."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxcoll._cluster.launch.local import coordinated, world_variables
from jaxcoll._cluster.launch.subprocesses import surely_ended

pytestmark = pytest.mark.processes
JOB = Path(__file__).with_name("regroup_job.py")


class Workers:
    """Some processes of the job, of which each may be started again."""

    def __init__(self, count, what, folder, running, address):
        self._what, self._folder, self._running = what, folder, running
        self._variables = world_variables(address, count)
        self.processes = [self.start(rank) for rank in range(count)]

    def start(self, rank, *more, **variables):
        command = [sys.executable, str(JOB), self._what, str(self._folder), *more]
        with (self._folder / f"{rank}.log").open("ab") as log:
            out = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return self._running.start(command, self._variables[rank] | variables, **out)

    def logs(self):
        return [(self._folder / f"{r}.log").read_text() for r in range(len(self.processes))]

    def wait(self, when_killed=lambda rank: None, limit=120):
        """Until all have ended; whoever was killed is given to `when_killed`."""
        until = time.monotonic() + limit
        while any(p.poll() is None for p in self.processes):
            assert time.monotonic() < until, "\n".join(text[-3000:] for text in self.logs())
            for rank, process in enumerate(self.processes):
                assert process.poll() in (None, 0, -signal.SIGKILL), "\n".join(self.logs())
                if process.poll() == -signal.SIGKILL:
                    when_killed(rank)
            time.sleep(0.05)
        told = [text.rpartition("TOLD ")[2] for text in self.logs()]
        assert all(p.poll() == 0 for p in self.processes), "\n".join(self.logs())
        return [json.loads(text) for text in told]


def test_two_workers_of_whom_one_is_late_ten_times_in_a_row_go_on(tmp_path):
    with coordinated(2) as coordinator, surely_ended() as running:
        both = Workers(2, "late", tmp_path, running, coordinator.address).wait()
    assert both[1]["late"] == 0, "it was late less often"
    for said in both:
        assert said["bits"] == said["plain"] == both[0]["bits"]
        assert len(said["changes"]) == 10
        assert all((lost, joined) == ([], []) for _, lost, joined in said["changes"])
    opened = both[1]["open"]
    assert opened[-1] == opened[2], f"each generation keeps something: {opened}"


def test_who_is_lost_comes_back_however_often_and_process_0_too(tmp_path):
    turns = [2, 0, 2, 2, 0, 2, 2]
    (tmp_path / "turns").write_text(" ".join(map(str, (-1, *turns))))
    refused = []
    with coordinated(3) as coordinator, surely_ended() as running:
        workers = Workers(3, "lost", tmp_path, running, coordinator.address)

        def again(rank):
            if rank == 0 and not refused:
                refused.append(with_two_devices(workers, rank))
            workers.processes[rank] = workers.start(rank, "again")

        three = workers.wait(again)
    assert [said["workers"] for said in three] == [[0, 1, 2]] * 3
    assert len({said["bits"] for said in three}) == 1
    changes = three[1]["changes"]
    assert [lost for _, lost, _ in changes if lost] == [[turn] for turn in turns]
    assert [joined for _, _, joined in changes if joined] == [[turn] for turn in turns]
    (said,) = refused
    assert said["error"] == "RuntimeError", said
    assert "Process 0 was started again with 2 CPU devices and had 1 when" in said["message"]


def with_two_devices(workers, rank):
    """What a process says that is started again with more devices than it had; it ends alone."""
    other = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_NUM_CPU_DEVICES": "2"}
    assert workers.start(rank, "again", **other).wait(60) == 3, workers.logs()[rank]
    return json.loads(workers.logs()[rank].rpartition("TOLD ")[2])
