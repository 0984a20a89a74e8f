"""Ranks in processes of their own: that teams take turns, how ranks fail, and that none is left."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import forks
import jax
import numpy as np
import pytest

from benchmarks import teams
from benchmarks.all_reduce import Workload, measure, text_of
from benchmarks.rank_pool import launched
from jaxcoll.cli.bench import AGAIN, BASELINE
from jaxcoll.errors import LaunchError

pytestmark = pytest.mark.product
FAKE = [sys.executable, str(Path(__file__).with_name("fake_rank.py")), str(teams.HERE)]
TREE = Workload("pair", (jax.ShapeDtypeStruct((3,), np.float32),) * 2)
TWIN = BASELINE + AGAIN


@contextmanager
def team(tmp_path, *entries, **env):
    journal = {"JOURNAL": str(tmp_path / "journal")}
    worlds = [{**journal, "RANK": str(rank), **env} for rank in range(2)]
    with launched("fake", entries, FAKE, worlds, 30) as ranks:
        try:
            yield ranks
        finally:
            pids = [process.pid for process in ranks._running]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_teams_take_turns(tmp_path):
    ours = [(BASELINE,), (TWIN,), ("slow",)]
    theirs = [("theirs slow", "theirs quick")]
    with team(tmp_path, *ours) as first, team(tmp_path, *theirs) as second:
        lines = measure(TREE, [first, second], reduce_op="sum", rounds=4)
    assert [line["algorithm"] for line in lines] == [BASELINE, TWIN, "slow", "theirs quick"]
    _, _, slow, quick = lines
    assert quick["ratio"]["median"] == pytest.approx(1)
    assert slow["ratio"]["median"] == pytest.approx(25), "50 ms and 2 ms"
    assert (slow["compile_seconds"], quick["compile_seconds"]) == (0.5, None)
    assert (slow["calls"], quick["calls"] > 1) == (1, True)
    assert {line["error"] for line in lines} == {0.25}, "the worst rank's"
    assert (slow["bytes"], slow["leaves"], slow["devices"]) == (24, 2, 2)
    assert slow["busbw"] == pytest.approx(24e-9 / slow["seconds"]["median"])
    assert "theirs quick" in text_of(lines)
    journal = (tmp_path / "journal").read_text().split("\n")
    order = [name for k, name in enumerate(journal) if name and (k == 0 or name != journal[k - 1])]
    names = [BASELINE, TWIN, "slow", "theirs quick"]
    assert order[-4 * 4 + 3 :] == [*names, *names[2::-1], *names[1:], *names[2::-1]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("killed", r"fake: process 1 of 2 was killed by SIGKILL \(time 'killed'\)\.$"),
        ("raises", r"fake: process \d of 2 failed \(time 'raises'\): ValueError: it went wrong$"),
        ("exits", r"process \d of 2 ended \(3\) \(time 'exits'\)\. Last output: these were its"),
        ("stuck", r"fake: time 'stuck' took longer than 1 s on processes 0, 1 of 2; --timeout"),
    ],
)
def test_failing_rank_ends_team(tmp_path, name, message):
    with team(tmp_path, (name,)) as ranks:
        ranks._timeout = 1 if name == "stuck" else 30  # a start may take longer
        with pytest.raises(LaunchError, match=message):
            ranks.do("time", name=name, calls=1)


DRIVER = """
import sys
from benchmarks.rank_pool import launched
with launched("fake", [], sys.argv[1:], [{"RANK": str(rank)} for rank in range(2)], 60) as team:
    print(*(process.pid for process in team._running), flush=True)
    team.do("time", name="stuck", calls=1)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_driver(tmp_path, end):
    command = [sys.executable, "-c", DRIVER, *FAKE]
    own = {**os.environ, "JOURNAL": str(tmp_path / "journal"), "PYTHONPATH": str(teams.HERE.parent)}
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as driver:
        pids = driver.stdout.readline().split()
        while not (tmp_path / "journal").exists():
            time.sleep(0.01)
        driver.send_signal(end)
    assert forks.gone(pids), "a stuck one sleeps for a minute"


def test_failed_start_is_one_line():
    worlds = [{"FAIL": "1"}] * 2
    with pytest.raises(LaunchError, match=r"of 2 failed \(start\): OSError: no such world$"):
        launched("fake", [], FAKE, worlds, 30).__enter__()


def test_missing_library_is_named():
    for python, message in (
        (sys.executable, "has no tensorflow; name an interpreter that has it with --tensorflow-py"),
        ("/no/such/python", "--tensorflow-python: there is no interpreter '/no/such/python'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            teams.peer("tensorflow", python, 2, 30)


PEER = """
import json, os
from ranks.data import block
from ranks.rank import Rank, serve

class Peer(Rank):
    def world(self):
        return {"devices": 2, "processes": 2, "device": "cpu", "library": "json 1",
                "entries": [["json flat"], ["json@1", "json@2"]]}
    def prepare(self, leaves, reduce_op): ...
    def barrier(self): ...
    def call(self, name): ...
    def describe(self, name):
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        return {"torch": (os.environ["RANK"], os.environ["WORLD_SIZE"]), "tensorflow": task["index"]}

def main():
    serve(Peer)
"""


def test_peer_names_contestants_and_world(monkeypatch, tmp_path):
    for file in ("__init__", "rank", "data"):
        (tmp_path / "ranks").mkdir(exist_ok=True)
        text = (teams.HERE / "ranks" / f"{file}.py").read_text()
        (tmp_path / "ranks" / f"{file}.py").write_text(text)
    (tmp_path / "ranks" / "json_rank.py").write_text(PEER)
    monkeypatch.setattr(teams, "HERE", tmp_path)
    with teams.peer("json", None, 2, 30) as peer:
        assert peer.entries == (("json flat",), ("json@1", "json@2"))
        replies = peer.do("describe", name="")
    assert [r["torch"] for r in replies] == [("0", "2"), ("1", "2")]
    assert [r["tensorflow"] for r in replies] == [0, 1]
