"""`jaxcoll bench --calibrate`: what it measures, keeps, shows and refuses."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from processes.ranks import launch

from jaxcoll._mesh import machine_costs
from jaxcoll._mesh.machine_costs import saved, terms_here
from jaxcoll._plan.cost import fit
from jaxcoll._plan.cost.model import Prices
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import parsed, terms_of
from jaxcoll._plan.world import World
from jaxcoll.bench import all_reduce, calibrate, targets
from jaxcoll.bench import rank_pool as teams
from jaxcoll.bench.naming import BASELINE
from jaxcoll.cli.main import main

WORLD = World("cpu", (4,), processes=4)
KiB = 1 << 10
FEW = {
    "SIZES": (KiB, 4 * KiB, 8 * KiB, 16 * KiB),
    "EXCHANGED": (KiB, 16 * KiB),
    "_ARRAYS": 3,
    "_PACKS": ((4, 4 * KiB), (8, KiB)),
}


class FakeTeam(teams.Team):
    """Four processes whose time is what the preset predicts, halved."""

    def __init__(self, world=WORLD, machines=("abacus",) * 4):
        super().__init__([], {})
        self.requests, self.machines, self.terms = [], machines, preset(world)
        self.tree, self.built = [], {}

    def do(self, method, **arguments):
        self.requests.append(method)
        return [getattr(self, method)(rank, **arguments) for rank in range(len(self.machines))]

    def costs(self, rank):
        return {
            "usual": self.terms.to_dict(),
            "sizes": [self.terms.key.replicas],
            "measured_on": {"machine": self.machines[rank], "keeps_memory": True},
            "file": "kept.json",
        }

    def prepare(self, rank, leaves, reduce_op):
        self.tree = leaves

    def build(self, rank, name, algorithm, first, stop, terms):
        self.built[name] = (algorithm, [4 * x["shape"][0] for x in self.tree[first:stop]])
        return terms["native"][0]["points"][0][1]

    def time(self, rank, name, calls):
        algorithm, leaves = self.built[name]
        carrier = "native" if algorithm == BASELINE else algorithm.removesuffix("@all")
        if algorithm == "auto":
            carrier = "native"
        one = calibrate.Probe(carrier, len(leaves), leaves[0], algorithm.endswith("@all"))
        seconds = Prices(self.terms, (4,)).predict([one.load((4,))]).seconds / 2
        return {"seconds": seconds * calls * (rank + 1) / 4, "cpu_seconds": 0.0}


def calibrated(team, progress=lambda words: None, writes=lambda file: None):
    return calibrate.calibrate(team, progress, writes=writes)


def test_a_world_that_is_twice_as_fast_as_the_preset():
    words, asked = [], []
    found = calibrated(FakeTeam(), words.append, asked.append)
    assert len(words) <= calibrate.STEPS
    assert asked == [found.file] == [Path("kept.json")]
    assert found.terms.source == (
        "calibration: gloo, 4 replicas, 4 processes, 1 host, abacus, memory that malloc keeps"
    )
    for name in ("call", "reduce", "copy", "slice"):
        assert getattr(found.terms, name) == pytest.approx(getattr(found.usual, name) / 2, rel=0.1)
    assert found.terms.between.per_byte == pytest.approx(found.usual.between.per_byte / 2, rel=0.1)
    assert found.terms.native[0].latency == pytest.approx((4.5e-3 + found.usual.array) / 2)
    assert found.predicted == found.terms.native[0].latency, "the ranks got the new terms"
    assert found.measured > 0
    assert calibrate.FEWEST <= found.rounds <= calibrate.MOST


def test_what_cannot_be_written_is_found_out_before_anything_is_measured():
    team = FakeTeam()

    def refuse(file):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        calibrated(team, writes=refuse)
    assert team.requests == ["costs"]


@pytest.mark.parametrize(
    ("team", "words"),
    [
        (FakeTeam(World("cpu", (1,))), "one device exchanges nothing; give it two or more"),
        (
            FakeTeam(machines=("abacus", "abacus", "slide rule", "abacus")),
            "processes 0 and 2 are not on machines alike .*abacus.*slide rule.*no terms hold",
        ),
    ],
    ids=["one", "unlike"],
)
def test_worlds_that_are_refused(team, words):
    with pytest.raises(ValueError, match=words):
        calibrated(team)


@pytest.fixture
def fake_world(monkeypatch):
    @contextlib.contextmanager
    def teams_of(entries, **where):
        yield [FakeTeam()]

    monkeypatch.setattr(targets, "teams_of", teams_of)
    monkeypatch.setattr(targets, "is_first", lambda teams: True)
    return FakeTeam


def test_a_cache_that_cannot_be_written_is_one_line_and_status_2(fake_world, monkeypatch, capsys):
    costs = FakeTeam.costs
    monkeypatch.setattr(
        FakeTeam, "costs", lambda self, rank: {**costs(self, rank), "file": "/proc/no/kept.json"}
    )
    assert main(["bench", "--calibrate"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("jaxcoll bench: --calibrate: cannot write /proc/no/kept.json")
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize("end", ["interrupt", "fail"])
def test_an_interrupted_calibration_leaves_what_was_there(
    fake_world, monkeypatch, tmp_path, capsys, end
):
    file = tmp_path / "terms.json"
    file.write_text("before")

    def time(self, rank, name, calls):
        if end == "interrupt":
            os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("it went wrong")

    monkeypatch.setattr(FakeTeam, "time", time)
    assert main(["bench", "--calibrate", "--json", str(file)]) == (130 if end == "interrupt" else 2)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("terms.json", "before")]


def test_lines_on_standard_output_and_the_table_beside_them(fake_world, capsys):
    assert main(["bench", "--calibrate", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    data = parsed(out)
    assert data.pop("measured_on") == {"machine": "abacus", "keeps_memory": True}
    assert terms_of(data).key.replicas == 4
    for words in ("term", "native, 64MiB", "between.per_byte", "Held out, resnet50 by auto",
                  "medians of", "as the preset has it", "name it in JAXCOLL_TERMS"):  # fmt: skip
        assert words in err


def few(monkeypatch, tmp_path):
    """A calibration that is over at once."""
    tree = tmp_path / "tree.json"
    tree.write_text('[{"shape": [100]}, {"shape": [3]}]')
    for name, value in FEW.items():
        monkeypatch.setattr(fit, name, value)
    monkeypatch.setattr(calibrate, "SECONDS", 0.01)
    monkeypatch.setattr(all_reduce, "SHORTEST", 0.0001)
    monkeypatch.setattr(calibrate, "HELD_OUT", str(tree))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_devices_of_this_process_go_by_what_was_measured(monkeypatch, tmp_path, capsys):
    few(monkeypatch, tmp_path)
    monkeypatch.setattr(machine_costs, "keeps_freed_memory", lambda: False)
    file = saved(World("cpu", (8,)))
    file.parent.mkdir(parents=True)
    file.write_text("{ what an older one has left")
    assert main(["bench", "--devices", "8", "--calibrate"]) == 0
    assert list((tmp_path / "cache").rglob("*.*")) == [file]
    assert file.name == "memory-n8-processes1-hosts1.json"
    for read_once in (machine_costs._text, machine_costs._texts):
        read_once.cache_clear()  # as in a later process
    found = terms_here(World("cpu", (8,)))
    assert found.source.startswith("calibration: memory, 8 replicas, 1 process, 1 host, ")
    assert [size for size, _ in found.native[0].points] == list(FEW["SIZES"])
    assert "where programs of one process on this machine find it" in capsys.readouterr().out


PLANNED = """
import jax, jaxcoll as jc
from jaxcoll._cluster.launch.local import join
join()
print("found", jc.plan(jax.ShapeDtypeStruct((8,), "float32")).terms.source)
"""


@pytest.mark.processes
def test_processes_that_are_launched_go_by_what_was_measured(monkeypatch, tmp_path, capsys):
    few(monkeypatch, tmp_path)
    assert main(["bench", "--processes", "2", "--calibrate"]) == 0
    (file,) = (tmp_path / "cache").rglob("*.*")
    assert file.name == "gloo-n2-processes2-hosts1-kept.json"
    data = json.loads(file.read_text())
    assert (data["key"]["processes"], data["measured_on"]["keeps_memory"]) == (2, True)
    assert min(t for _, t in data["native"][0]["points"]) > 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"JAXCOLL_TERMS={file}" in printed.out
    for log in launch([sys.executable, "-c", PLANNED], 2, timeout=120):
        assert "found calibration: gloo, 2 replicas, 2 processes, 1 host" in log
