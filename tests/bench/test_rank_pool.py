"""Ranks in processes of their own: what they do, how they fail, and that none is left behind."""

import os
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxcoll._errors import LaunchError
from jaxcoll.bench import targets
from jaxcoll.bench.all_reduce import measure, steps
from jaxcoll.bench.naming import BASELINE, TWIN
from jaxcoll.bench.rank_pool import launched
from jaxcoll.bench.workloads import Workload
from jaxcoll.cli.main import main

peers = targets.from_checkout("--against: its ranks are", "peer")
BENCH = Path(sys.modules[measure.__module__].__file__).parent
FAKE = [sys.executable, str(Path(__file__).with_name("fake_rank.py")), str(BENCH)]
TREE = Workload("pair", (jax.ShapeDtypeStruct((3,), np.float32),) * 2)


@contextmanager
def team(tmp_path, *entries, timeout=30, **env):
    journal = {"JOURNAL": str(tmp_path / "journal")}
    worlds = [{**journal, "RANK": str(rank), **env} for rank in range(2)]
    with launched("fake", entries, FAKE, worlds, timeout) as found:
        try:
            yield found
        finally:
            pids = [process.pid for process in found._running]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_two_teams_take_turns_in_one_run(tmp_path):
    done = []
    ours = [(BASELINE,), (TWIN,), ("slow",)]
    theirs = [("theirs slow", "theirs quick")]
    with team(tmp_path, *ours) as first, team(tmp_path, *theirs) as second:
        results = measure(TREE, [first, second], reduce_op="sum", rounds=4, progress=done.append)
    assert [r.algorithm for r in results] == [BASELINE, TWIN, "slow", "theirs quick"]
    assert len(done) == steps(TREE, [first, second], 4)
    _, _, slow, quick = results
    assert quick.ratio.median < 2 < slow.ratio.median, "50 ms and 2 ms"
    assert (slow.compile_seconds, quick.compile_seconds) == (0.5, None)
    assert (slow.calls, quick.calls > 1) == (1, True)
    assert {r.error for r in results} == {0.25}, "the worst rank's"
    assert (slow.bytes, slow.leaves, slow.devices, slow.bus_factor) == (24, 2, 2, 1.0)
    assert slow.to_dict()["busbw"] == pytest.approx(24e-9 / slow.seconds.median)
    journal = (tmp_path / "journal").read_text().split("\n")
    order = [name for k, name in enumerate(journal) if name and (k == 0 or name != journal[k - 1])]
    rounds = order[-4 * 4 + 3 :]
    names = [BASELINE, TWIN, "slow", "theirs quick"]
    assert rounds == [*names, *names[2::-1], *names[1:], *names[2::-1]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("killed", r"fake: process 1 of 2 was killed by SIGKILL \(time 'killed'\)\.$"),
        ("raises", r"fake: process \d of 2 failed \(time 'raises'\): ValueError: it went wrong$"),
        (
            "exits",
            r"process \d of 2 ended \(3\) \(time 'exits'\)\. Its last words: these were its last words$",
        ),
        (
            "stuck",
            r"fake: time 'stuck' took longer than 1 s on processes 0, 1 of 2; --timeout allows",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_team(tmp_path, name, words):
    start = time.monotonic()
    with pytest.raises(LaunchError, match=words), team(tmp_path, (name,), timeout=1) as found:
        found.do("time", name=name, calls=1)
    assert time.monotonic() - start < 20


def test_ranks_that_cannot_meet_say_why_in_one_line():
    worlds = [{"FAIL": "1"}] * 2
    with pytest.raises(LaunchError, match=r"of 2 failed \(start\): OSError: no such world$"):
        launched("fake", [], FAKE, worlds, 30).__enter__()


@pytest.mark.parametrize(
    ("python", "words"),
    [
        (
            sys.executable,
            "has no tensorflow; name an interpreter that has it with --tensorflow-python",
        ),
        ("/no/such/python", "--tensorflow-python: there is no interpreter '/no/such/python'"),
    ],
)
def test_a_library_that_is_not_there(python, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        peers.peer("tensorflow", python, 2, 30).__enter__()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--against", "torch", "--processes", "2"], "--against torch: its ranks are in jaxcoll's"),
        (["--regret"], "--regret: it is in jaxcoll's"),
        (["--overlap", "2"], "--overlap: it is in jaxcoll's"),
    ],
)
def test_what_only_the_source_tree_has_says_so(monkeypatch, tmp_path, flags, words, capsys):
    monkeypatch.setattr(targets, "SOURCES", tmp_path)
    assert main(["bench", *flags]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert "not in the wheel: run `jaxcoll bench` from a checkout." in complaint


PEER = """
import json, os
from ranks.data import block
from ranks.rank import Rank, serve

class Peer(Rank):
    def world(self):
        return {"devices": 2, "processes": 2, "platform": "cpu", "library": "json 1",
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


def test_a_peer_names_its_contestants_and_knows_its_world_as_its_library_reads_it(
    monkeypatch, tmp_path
):
    (tmp_path / "json_rank.py").write_text(PEER)
    monkeypatch.setattr(peers, "SOURCES", tmp_path)
    with peers.peer("json", None, 2, 30) as found:
        assert found.entries == (("json flat",), ("json@1", "json@2"))
        replies = found.do("describe", name="")
    assert [r["torch"] for r in replies] == [("0", "2"), ("1", "2")]
    assert [r["tensorflow"] for r in replies] == [0, 1]
