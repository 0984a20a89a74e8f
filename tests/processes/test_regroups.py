"""Generations of workers of which there is no end: every one makes its own connections."""

import json
import signal
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import forks
import jax
import numpy as np
import pytest
from processes.regroup_rows import local_rounds, owing_rows

import jaxcoll as jc
from jaxcoll._cluster.coordinator import start_coordinator
from jaxcoll._cluster.launch.supervisor import world_variables

pytestmark = pytest.mark.processes
JOB = Path(__file__).with_name("regroup_job.py")


class Workers:
    """Some processes of the job, of which each may be started again."""

    def __init__(self, count, what, folder, running, address):
        self._what, self._folder, self._running = what, folder, running
        self._variables = world_variables(address, count)
        self.processes = [self.start(rank) for rank in range(count)]

    def start(self, rank, *more, **variables):
        command = [sys.executable, JOB, self._what, self._folder, *more]
        own = self._variables[rank] | variables
        with (self._folder / f"{rank}.log").open("ab") as log:
            return self._running.start(command, own, stdout=log)

    def again(self, rank):
        self.processes[rank] = self.start(rank, "again")

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
        lines = [text.rpartition("RESULT ")[2] for text in self.logs()]
        assert all(p.poll() == 0 for p in self.processes), "\n".join(self.logs())
        return [json.loads(text) for text in lines]


@contextmanager
def workers(count, what, folder):
    with (
        closing(start_coordinator("127.0.0.1:0", count)) as coordinator,
        forks.running() as running,
    ):
        yield Workers(count, what, folder, running, coordinator.address)


def test_two_workers_of_whom_one_is_late_four_times_in_a_row_go_on(tmp_path):
    with workers(2, "late", tmp_path) as started:
        both = started.wait()
    assert both[1]["late"] == 0, "it was late less often"
    for result in both:
        assert result["bits"] == result["plain"] == both[0]["bits"]
        assert len(result["changes"]) == 4
        assert all((lost, joined) == ([], []) for _, lost, joined in result["changes"])
    opened = both[1]["open"]
    assert opened[-1] == opened[2], f"each generation keeps something: {opened}"


def test_who_is_lost_comes_back_however_often_and_process_0_too(tmp_path):
    turns = [2, 0, 2]
    (tmp_path / "turns").write_text(" ".join(map(str, (-1, *turns))))
    refused = []
    with workers(3, "lost", tmp_path) as started:

        def again(rank):
            if rank == 0 and not refused:
                refused.append(with_two_devices(started, rank))
            started.again(rank)

        three = started.wait(again)
    assert [result["workers"] for result in three] == [[0, 1, 2]] * 3
    assert len({result["bits"] for result in three}) == 1
    changes = three[1]["changes"]
    assert [lost for _, lost, _ in changes if lost] == [[turn] for turn in turns]
    assert [joined for _, _, joined in changes if joined] == [[turn] for turn in turns]
    (result,) = refused
    assert result["error"] == "RuntimeError", result
    assert "Process 0 was started again with 2 CPU devices and had 1 when" in result["message"]


def test_survivors_keep_their_residuals_and_what_the_dead_took_along_is_all_that_is_missing(
    tmp_path,
):
    with workers(3, "owing", tmp_path) as started:
        three = started.wait(started.again)
    assert [result["workers"] for result in three] == [[0, 1, 2]] * 3
    assert len({result["bits"] for result in three}) == 1
    (lost_at, lost, _), (taken_at, _, joined) = three[0]["changes"]
    assert (lost, joined) == ([1], [1])
    there = lambda at, rank: rank != 1 or not lost_at <= at < taken_at
    given = sum(
        owing_rows(at, rank)[0].astype("f8")
        for at in range(60)
        for rank in range(3)
        if there(at, rank)
    )
    owed = [np.load(tmp_path / f"rank{rank}.npy").astype("f8") for rank in range(3)]
    took = np.load(tmp_path / f"{lost_at}.npy").astype("f8")
    size, gone = np.linalg.norm(given), np.linalg.norm(took)
    left = given - np.load(tmp_path / "sum.npy") - sum(owed)
    assert np.linalg.norm(left - took) < 1e-6 * size
    assert gone > 1e-3 * size
    assert 0.5 * gone < three[0]["residual"][0] < 2 * gone
    assert three[0]["residual"][1] == 0
    saved, step = jc.restore_checkpoint(
        tmp_path / "last.npz",
        {"sum": np.zeros(600, "f"), "r": jc.compression.residual(np.zeros(600, "f"))},
    )
    assert step == 60
    np.testing.assert_allclose(jc.unshard(saved["r"]), sum(owed), rtol=0, atol=1e-5)


def test_diloco_go_on_without_the_lost_and_a_newcomer_gets_the_shared_parameters(tmp_path):
    with workers(3, "rounds", tmp_path) as started:
        three = started.wait(started.again)
    assert len({result["bits"] for result in three}) == 1
    (lost_at, lost, _), (taken_at, _, joined) = three[0]["changes"]
    # It died after 18 local steps, and had last met the others after 15.
    assert (lost_at, lost, joined) == (15, [1], [1])
    assert three[0]["begun"] == three[2]["begun"] == list(range(60)), "no local step is repeated"
    assert three[1]["begun"] == list(range(taken_at, 60))
    shared, own = local_rounds(60, 5, lost_at, taken_at)
    for rank in range(3):
        with np.load(tmp_path / f"rank{rank}.npz") as found:
            got = [x if x.ndim == 1 else x[0] for x in found.values()]
        for a, b in zip(got, jax.tree.leaves((shared, own[rank])), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def with_two_devices(workers, rank):
    """What a process says that is started again with more devices than it had; it ends alone."""
    other = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_NUM_CPU_DEVICES": "2"}
    assert workers.start(rank, "again", **other).wait(60) == 3, workers.logs()[rank]
    return json.loads(workers.logs()[rank].rpartition("RESULT ")[2])
