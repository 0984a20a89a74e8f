"""Generations of workers of which there is no end: every one makes its own connections."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from processes.regroup_rows import local_rounds, owing_rows

import jaxcoll as jc
from jaxcoll._job.launch import supervisor

pytestmark = pytest.mark.processes
JOB = Path(__file__).with_name("regroup_job.py")


@pytest.fixture
def workers(launched, monkeypatch, tmp_path):
    """From a number and a job to the last result of each worker, and all that one of them had."""
    monkeypatch.setattr(supervisor, "SETTLE_SECONDS", 0.2)

    def run(count, what):
        flags = ["-n", count, "--keep-going", "--restarts", 9, "--timeout-seconds", 120]
        done = launched(*flags, JOB, what, tmp_path)
        found = re.findall(r"^\[(\d)\] RESULT (.*)$", done.stdout, re.MULTILINE)
        last = dict(found)
        assert len(last) == count, done
        return [json.loads(last[str(rank)]) for rank in range(count)], found

    return run


def test_lateness_four_times_is_survived(workers):
    both, _ = workers(2, "late")
    assert both[1]["late"] == 0, "it was late less often"
    for result in both:
        assert result["bits"] == result["plain"] == both[0]["bits"]
        assert len(result["changes"]) == 4
        assert all((lost, joined) == ([], []) for _, lost, joined in result["changes"])
    opened = both[1]["open"]
    assert opened[-1] == opened[2], f"each generation keeps something: {opened}"


def test_lost_workers_come_back(workers, tmp_path):
    turns = [2, 0, 2]
    (tmp_path / "turns").write_text(" ".join(map(str, (-1, *turns))))
    three, found = workers(3, "lost")
    assert [result["workers"] for result in three] == [[0, 1, 2]] * 3
    assert len({result["bits"] for result in three}) == 1
    changes = three[1]["changes"]
    assert [lost for _, lost, _ in changes if lost] == [[turn] for turn in turns]
    assert [joined for _, _, joined in changes if joined] == [[turn] for turn in turns]
    refused, _ = (json.loads(text) for rank, text in found if rank == "0")
    assert refused["error"] == "RuntimeError", refused
    assert "Process 0 was restarted with 2 CPU devices, but had 1 when" in refused["message"]


def test_only_dead_residual_is_lost(workers, tmp_path):
    three, _ = workers(3, "owing")
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


def test_rounds_survive_a_loss(workers, tmp_path):
    three, _ = workers(3, "rounds")
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
