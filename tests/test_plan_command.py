"""`jaxcoll plan`: plans and simulations from shapes, and errors in one line."""

import json

import pytest

from jaxcoll._plan.plan import COLUMNS
from jaxcoll.cli.main import main


def ran(capsys, *flags):
    status = main(["plan", *map(str, flags)])
    return status, *capsys.readouterr()


def test_a_plan_for_a_cluster(capsys):
    status, out, _ = ran(capsys, "--tree", "200x1KiB", "--topology", "h100:2x8")
    assert status == 0
    assert "all_reduce MEAN of 200 leaves, 204,800 bytes a replica, over 16 × gpu" in out
    assert "from Hopper" in out


def test_why_stands_above_a_long_table_which_is_folded(capsys):
    status, out, _ = ran(capsys)
    lines = out.splitlines()
    assert (status, len(lines)) == (0, 4 + 1 + 20)
    assert lines[0].startswith("all_reduce MEAN of 161 leaves")
    assert lines[1].startswith("packs: every leaf alone, because")
    assert lines[3].startswith("predicted: ")
    assert lines[4].split() == list(COLUMNS)
    assert lines[-1] == "… and 142 more: `plan.text()`, or --all-rows, shows them"
    whole = ran(capsys, "--all-rows")[1].splitlines()
    assert [line.split() for line in whole[4:-142]] == [line.split() for line in lines[4:-1]]
    assert whole[-1].split()[:2] == ["160", "float32"]


def test_a_plan_as_json(capsys, tmp_path):
    tree = tmp_path / "mine.json"
    tree.write_text('[{"shape": [100]}, {"shape": [3], "dtype": "bfloat16"}]')
    flags = ("--tree", tree, "--devices", 4, "--dtype", "float16", "--reduce-op", "sum")
    status, out, _ = ran(capsys, *flags, "--algorithm", "ring@all", "--json", "-")
    assert status == 0
    plan = json.loads(out)
    assert (plan["reduce_op"], plan["algorithm"], plan["replicas"]) == ("SUM", "ring", 4)
    assert [pack["dtype"] for pack in plan["packs"]] == ["float16", "bfloat16"]
    assert ran(capsys, *flags, "--json", tmp_path / "plan.json")[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["replicas"] == 4


def test_two_levels_and_processes(capsys):
    _, out, _ = ran(capsys, "--topology", "h100:2x8", "--algorithm", "native/ring", "--json", "-")
    assert json.loads(out)["axis_sizes"] == [2, 8]
    _, out, _ = ran(capsys, "--processes", 4, "--tree", "200x1KiB")
    assert "over 4 × cpu, 4 processes" in out


@pytest.mark.parametrize(
    ("where", "island"),
    [((), 8), (("--topology", "v5p:8x8x8"), 8192), (("--processes", 2), 1)],
    ids=["default", "tpu", "gloo"],
)
def test_a_simulation(capsys, tmp_path, where, island):
    picture = tmp_path / "a.png"
    status, out, _ = ran(capsys, "--simulate", *where, "--plot", picture, "--json", "-")
    assert status == 0
    found = json.loads(out)
    assert found["replicas_of_an_island"] == island
    by_name = {}
    for x in found["predictions"]:
        by_name.setdefault(x["algorithm"], {})[x["replicas"]] = x["seconds"]
    assert list(by_name) == ["native", "native/native", "ring", "halving-doubling", "shuffle"]
    assert all(list(line) == [2**k for k in range(1, 15)] for line in by_name.values())
    assert by_name["ring"][16384] > by_name["halving-doubling"][16384]
    if island >= 8:
        assert by_name["native"][8] == by_name["native/native"][8]
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, out, _ = ran(capsys, "--simulate", *where, "--algorithms", "ring,shuffle")
    assert status == 0
    assert len(out.splitlines()) == 17
    assert "Predicted, not measured, from" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tree", "resnet51"), "no tree 'resnet51': choose resnet50"),
        (("--dtype", "float33"), "no dtype 'float33'"),
        (("--dtype", "float64"), "JAX holds float64 as float32: ask for that, or set JAX_ENABLE"),
        (("--topology", "h101:8"), "There is no topology 'h101:8'. Nearest: 'h100:8'"),
        (("--algorithm", "rnig"), "no algorithm 'rnig'"),
        (("--algorithm", "ring/ring"), "is hierarchical"),
        (("--devices", 0), "--devices must be at least 1; got 0"),
        (("--plot", "a.png"), "--plot draws what --simulate predicts"),
        (("--algorithms", "ring"), "--algorithms is for what --simulate predicts"),
        (("--simulate", "--algorithm", "ring"), "--simulate takes --algorithms"),
        (("--simulate", "--plot", "a.pdf"), "ends in .png"),
        (("--simulate", "--all-rows"), "--all-rows is for a plan's table"),
        (("--simulate", "--plot", "/proc/no/a.png"), "--plot: cannot write"),
        (("--json", "/proc/no/a.json"), "--json: cannot write"),
        (("--simulate", "--devices", 8), "devices of one process share one machine"),
        (("--simulate", "--topology", "cpu:8"), "simulated devices share one machine"),
        (("--simulate", "--algorithms", "rnig"), "`algorithm` must be None or one of"),
        (("--simulate", "--algorithms", "ring/ring/ring"), "has 3 parts"),
        (("--simulate", "--algorithms", ","), "--algorithms names none"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(capsys, flags, words):
    status, out, error = ran(capsys, *flags)
    assert (status, out) == (2, "")
    assert error.startswith("jaxcoll plan: ")
    assert words in error
    assert error.count("\n") == 1


def test_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, error = ran(capsys, "--simulate", "--plot", tmp_path / "a.png")
    assert status == 2
    assert "pip install 'jaxcoll[cli]'" in error
